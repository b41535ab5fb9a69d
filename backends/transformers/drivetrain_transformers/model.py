"""Load a causal LM of transformers, and run prompts and a running batch through it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.utils.generic import ModelOutput

from drivetrain.backend.base import ModelInfo
from drivetrain.backend.toolkit.progress_bars import no_progress_bars
from drivetrain.backend.toolkit.rope_config import short_rope_length
from drivetrain.backend.toolkit.translation import eos_token_ids
from drivetrain.errors import EngineInternalError, EngineStartError
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Isolation, Task
from drivetrain_transformers.decode_graphs import DecodeGraphs, FixedStep, can_be_fixed
from drivetrain_transformers.expert_choices import ExpertChoices
from drivetrain_transformers.kv_cache import RunningCache, keys_and_values
from drivetrain_transformers.longrope import choose_factors_by_row
from drivetrain_transformers.lora import Adapters
from drivetrain_transformers.recurrent_states import empty_cache, is_recurrent
from drivetrain_transformers.row_media import MediaPass, Padded, RowMedia
from drivetrain_transformers.translate import context_length, device_of, load_arguments, media_capabilities
from drivetrain_weight_sync.receiver.checkpoint_comparison import refuse_incomplete
from drivetrain_weight_sync.receiver.cpu_sleep import trim_heap
from drivetrain_weight_sync.transports.device_memory import uuid_of

_TOLERATED = 0.1
"""Largest change of the logits by rounding, as a share of their norm; wrong positions change them by more."""
_UNORDERED = 0.01
"""Likewise for the same pass twice, on devices that add in any order."""
_CACHE_NAMES = ("past_key_values", "cache", "cache_params")
"""Names of ``forward``'s parameter for the cache, by model and release."""
_MOST_STEPS = 64
"""Most tokens run one by one after a cached prefix, by models that cannot run several after one."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Results of one forward pass."""

    logits: torch.Tensor
    states: torch.Tensor | None = None
    """Each row's last token in the last layer, after the final norm: what the head is given; (rows, hidden size)."""
    experts: torch.Tensor | None = None
    """Experts of each position: (rows, padded tokens, layers with experts, experts per token)."""
    before_head: torch.Tensor | None = None
    """Output of the layers at the last positions, for :meth:`LoadedModel.head`; (rows, positions, hidden size)."""


class LoadedModel:
    """A model on its device, in inference mode."""

    def __init__(self, module: PreTrainedModel, info: ModelInfo) -> None:
        self.module = module
        self.info = info
        self.device = torch.device(info.device)
        self.adapters: Adapters | None = None
        self.short_length: int | None = None
        """Longest sequence that uses longrope's short factors; None unless longer ones are served too."""
        layers = DynamicCache(config=module.config).layers
        self.is_recurrent = any(map(is_recurrent, layers))
        """True if layers keep recurrent states, beside or instead of keys and values."""
        self._attends = not self.is_recurrent or any(isinstance(layer, CacheLayerMixin) for layer in layers)
        self.continues = True
        """True if several tokens can be run at once after a cached prefix."""
        takes = inspect.signature(module.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in takes), _CACHE_NAMES[0])
        self._positions = "position_ids" in takes
        self.choices = ExpertChoices(module)
        named = (getattr(module.config, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
        self.placeholders = [token_id for token_id in named if isinstance(token_id, int)]
        """Token ids that stand for images, videos and sounds."""
        self._keeps_logits = "logits_to_keep" in takes
        self.has_own_process = False
        """True if no other code of this process uses the GPU, so that CUDA graphs can be captured at any time."""
        self._layers_output: type[ModelOutput] | None = None
        """Type of what the layers return; None if the head cannot be run apart from them."""

    @classmethod
    def load(cls, config: EngineConfig, report: Callable[[str], None]) -> LoadedModel:
        """Load the model that ``config`` names.

        Raises:
            InvalidConfig: the configuration does not fit the model.
            EngineStartError: the model cannot be loaded, or keeps state that cannot be batched.
        """
        report(f"loading the model {config.model}")
        try:
            with no_progress_bars():
                # Tensors of another shape are told by the report below, which names them.
                arguments = {"ignore_mismatched_sizes": True, **load_arguments(config), "output_loading_info": True}
                read: Any = _loader(config).from_pretrained(config.model, **arguments)
        except (OSError, ValueError, KeyError, ImportError, TypeError, SafetensorError) as error:
            raise EngineStartError(
                f"transformers cannot load {config.model!r}: {type(error).__name__}: {error}"
            ) from error
        module: PreTrainedModel = read[0]
        # transformers would fill up the rest with random numbers.
        refuse_incomplete(config.model, sorted(map(str, read[1]["missing_keys"])), read[1]["mismatched_keys"])
        # Load on the CPU first: loading straight to a GPU, transformers puts all weights into one block of the
        # allocator, which cannot be freed while anything else lies in it.
        report(f"moving the model to {device_of(config)}")
        if not hasattr(module, "hf_device_map"):
            module.to(device_of(config))  # type: ignore[arg-type]  # transformers wraps `to` without its `self`
        module.eval()
        module.requires_grad_(False)
        _refuse_other_state(module)
        _own_storages(module)
        model_config = module.config.get_text_config(decoder=True)
        length = context_length(model_config, config)
        info = ModelInfo(
            vocab_size=model_config.vocab_size,
            context_length=length,
            eos_token_ids=eos_token_ids(getattr(module, "generation_config", None), model_config, module.config),
            dtype=str(module.dtype).removeprefix("torch."),
            architecture=type(module).__name__,
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            device=str(module.device),
            gpus=(uuid_of(module.device),) if module.device.type == "cuda" else (),
        )
        model = cls(module, info)
        short = short_rope_length(model_config.to_dict())
        if short is not None and short < length:
            choose_factors_by_row(module, short)
            model.short_length = short
        model.has_own_process = config.isolation is Isolation.PROCESS
        if config.task is Task.GENERATE:
            model._check_batching()
        if config.enable_lora:
            model.adapters = Adapters(module, largest_rank=config.max_lora_rank)
        return model

    @property
    def has_head_apart(self) -> bool:
        """True if :meth:`head` can be called."""
        return self._layers_output is not None

    def empty_cache(self) -> DynamicCache:
        """Return a cache of no tokens for a forward pass."""
        return empty_cache(self.module.config) if self.is_recurrent else DynamicCache()

    def continues_from(self, length: int, tokens: int) -> bool:
        """Return whether a sequence of ``tokens`` ids should begin with the cache of its first ``length``."""
        return self.continues or tokens - length <= _MOST_STEPS

    @torch.inference_mode()
    def _check_batching(self) -> None:
        """Check that a short row can be run beside a longer one, and that padding leaves its logits unchanged.

        Only models without ``position_ids`` and recurrent ones could count padding, so that only theirs are compared.

        Raises:
            EngineStartError: the model cannot be run so, or padding would change its output.
        """
        ids = [token % self.info.vocab_size for token in (5, 7, 11, 13, 17, 19, 23, 29, 31, 37)]
        rows = [ids[:3], ids[3:] * 4]
        name = type(self.module).__name__
        try:
            first, decoded = self._prefilled_and_decoded(rows, pad=0)
            self._find_head(rows[1])
            if self._positions and not self.is_recurrent:
                return
            alone = [self.module(input_ids=torch.tensor([row], device=self.device)).logits[0, -2:] for row in rows]
            again, _ = self._prefilled_and_decoded(rows, pad=1)
            if self.is_recurrent:
                self.continues = self._continues_in_one_pass(rows[1], alone[1][-1])
        except torch.OutOfMemoryError:
            raise
        except (IndexError, AttributeError, NotImplementedError, TypeError, ValueError, RuntimeError) as error:
            raise EngineStartError(
                f"{name} cannot run rows of different lengths in one batch, as the transformers backend does: "
                f"{type(error).__name__}: {error}"
            ) from error
        for row, wanted in enumerate(alone):
            got = torch.stack([first[row], decoded[row]])
            if _distance(got, wanted) > _TOLERATED:
                raise EngineStartError(
                    f"{name} counts padding as tokens, so that rows of different lengths cannot share a batch; the "
                    "transformers backend does not serve such models, use another backend"
                )
        if _distance(first, again) > _UNORDERED:
            raise EngineStartError(
                f"the ids of padding change the logits of {name}, so that rows of different lengths cannot share a "
                "batch; the transformers backend does not serve such models, use another backend"
            )

    def _find_head(self, row: list[int]) -> None:
        """Find out whether the head can be run apart from the layers: whether it then gives the same logits."""
        base, outputs = self.module.base_model, list[object]()
        if base is self.module:
            return
        listening = base.register_forward_hook(lambda *given: outputs.append(given[-1]))
        try:
            wanted = self.prefill([row], [None], self.empty_cache(), 0, all_positions=True).logits[0]
        finally:
            listening.remove()
        output = outputs[-1] if outputs else None  # some models call parts of their base instead
        states = getattr(output, "last_hidden_state", None)
        if not isinstance(output, ModelOutput) or not isinstance(states, torch.Tensor):
            return
        self._layers_output = type(output)
        try:
            is_same = _distance(self.head(states[0], None), wanted) <= _TOLERATED
        except torch.OutOfMemoryError:
            raise
        except (IndexError, AttributeError, NotImplementedError, TypeError, ValueError, RuntimeError):
            is_same = False  # then logits are computed at all positions
        if not is_same:
            self._layers_output = None

    def _prefilled_and_decoded(self, rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all ids but the last in one padded pass and the last in a step; return both logits of (rows, ids)."""
        nobody: list[str | None] = [None] * len(rows)
        cache, past = RunningCache(), self.empty_cache()
        before = self.prefill([row[:-1] for row in rows], nobody, past, 0, all_positions=False, pad=pad).logits
        before = before[:, -1].clone()
        cache.admit(past, list(range(len(rows))), [len(row) - 1 for row in rows])
        cache.open_column()
        return before, self.decode([row[-1] for row in rows], nobody, cache).logits

    def _continues_in_one_pass(self, row: list[int], wanted: torch.Tensor) -> bool:
        """Return whether the second half of a row, run in one pass, gives the logits of single steps."""
        half, errors = len(row) // 2, []
        for self.continues in (False, True):
            past = self.empty_cache()
            self.prefill([row[:half]], [None], past, 0, all_positions=False)
            try:
                last = self.prefill([row[half:]], [None], past, half, all_positions=False).logits[0, -1]
            except RuntimeError:  # shapes that do not fit
                return False
            errors.append(_distance(last, wanted))
        steps, together = errors
        return together <= 3 * steps + 1e-3

    @torch.inference_mode()
    def prefill(
        self,
        ids: list[list[int]],
        adapters: list[str | None],
        past: Cache,
        prefix: int,
        *,
        all_positions: bool,
        states: bool = False,
        experts: bool = False,
        before_head: int = 0,
        boundaries: Sequence[int] = (),
        between: Callable[[int], None] | None = None,
        pad: int = 0,
        media: Sequence[RowMedia | None] = (),
    ) -> Computed:
        """Run token ids whose first ``prefix`` tokens are in ``past``, and append them to it, left-padded.

        Args:
            ids: Ids of each row after its prefix.
            adapters: Adapter of each row.
            past: The cache.
            prefix: Tokens of each row in ``past``.
            all_positions: True to return the logits of all positions.
            boundaries: Numbers of ids after which one forward pass must end and the next begin; none without one.
            between: Called between two forward passes with the columns in ``past``.
            pad: Id to pad with.
            states: True to return the state of each row's last token too.
            experts: True to return the experts of all positions too.
            media: Images and videos of each row; empty if no row has any.
            before_head: Number of last positions whose output of the layers is returned too, if the model
                :attr:`has_head_apart`.

        Returns:
            Logits of shape (rows, padded tokens or 1, vocabulary), the last position being each row's last token.
        """
        tokens, mask, positions = _left_padded(ids, prefix, pad)
        together: MediaPass | None = None
        if any(row is not None for row in media):
            padded = Padded(tokens, positions, [len(own) for own in ids], prefix)
            together = MediaPass(self.module, self.placeholders, media, padded)
            tokens, positions = together.tokens, together.positions
        longest = tokens.shape[1]
        steps = range(1, longest) if prefix and not self.continues else ()
        ends = sorted({*boundaries, *steps, longest})
        assert together is None or ends == [longest], "media are computed in one forward pass"
        parts: list[Computed] = []
        for start, end in itertools.pairwise([0, *ends]):
            if between is not None and start:
                between(prefix + start)
            seen, window = mask[:, : prefix + end], slice(start, end)
            parts.append(
                self._forward(
                    tokens[:, window],
                    seen,
                    positions[..., window],
                    past,
                    adapters,
                    last_only=not all_positions,
                    states=states and end == longest,
                    experts=experts,
                    media=together,
                    before_head=before_head > longest - end,
                )
            )
        if not bool(mask.all()):
            _zero_padding(past, mask)
        layers = [part.before_head for part in parts if part.before_head is not None]
        chosen = [part.experts for part in parts if part.experts is not None]
        return Computed(
            _joined([part.logits for part in parts]) if all_positions else parts[-1].logits,
            parts[-1].states,
            _joined(chosen) if chosen else None,
            _joined(layers)[:, -before_head:] if layers else None,
        )

    @torch.inference_mode()
    def head(self, before_head: torch.Tensor, adapter: str | None) -> torch.Tensor:
        """Run the model without its layers: the head, and the model's own changes of its logits.

        Args:
            before_head: Output of the layers at some positions; (positions, hidden size).
            adapter: The positions' adapter.

        Returns:
            Logits of shape (positions, vocabulary).
        """
        assert self._layers_output is not None, "the model has no head apart"
        output = self._layers_output(last_hidden_state=before_head[None])
        layers, count = vars(self.module.base_model), len(before_head)
        own = layers.get("forward")
        layers["forward"] = lambda *_, **__: output
        try:
            with self.adapters.using([adapter], count) if self.adapters is not None else nullcontext():
                ids = torch.zeros(1, count, dtype=torch.long, device=self.device)
                logits: torch.Tensor = self.module(input_ids=ids, use_cache=False).logits
        finally:
            del layers["forward"]
            if own is not None:
                layers["forward"] = own
        return logits[0]

    @torch.inference_mode()
    def decode(
        self,
        last_ids: list[int],
        adapters: list[str | None],
        cache: RunningCache,
        *,
        states: bool = False,
        experts: bool = False,
        media: Sequence[RowMedia | None] = (),
    ) -> Computed:
        """Run one token of each running row; return logits of shape (rows, vocabulary), and what else is asked for."""
        tokens = torch.tensor(last_ids, dtype=torch.long)[:, None]
        positions = torch.tensor(cache.lengths, dtype=torch.long)[:, None]
        for index, row in enumerate(media):
            if row is not None:
                positions[index] += row.offset

        def step() -> Computed:
            mask = cache.attention_mask()
            computed = self._forward(
                tokens, mask, positions, cache, adapters, last_only=True, states=states, experts=experts
            )
            return Computed(computed.logits[:, -1], computed.states, computed.experts)

        if cache.graphs is None or states or experts:
            return step()
        return Computed(
            cache.graphs.decode(last_ids, cache, lambda: step().logits, lambda fixed: self._fixed_step(fixed, cache))
        )

    def decode_graphs(self) -> DecodeGraphs | None:
        """Return an empty set of CUDA graphs for a running batch; None if its steps cannot be captured."""
        suits = self._positions and self._attends and not self.is_recurrent and not self.placeholders
        if not suits or self.device.type != "cuda" or not self.has_own_process or self.adapters is not None:
            return None
        return DecodeGraphs(self.module) if can_be_fixed(self.module) else None

    @torch.inference_mode()
    def _fixed_step(self, step: FixedStep, cache: RunningCache) -> torch.Tensor:
        """Run a step whose tensors are always the same; return logits of shape (the step's rows, vocabulary)."""
        with cache.fixed(step) as mask:
            arguments: dict[str, object] = {"logits_to_keep": 1} if self._keeps_logits else {}
            arguments[self._cache_name] = cache
            logits: torch.Tensor = self.module(
                input_ids=step.ids, attention_mask=mask, position_ids=step.positions, use_cache=True, **arguments
            ).logits
        return logits[:, -1]

    @torch.inference_mode()
    def states(self, ids: list[list[int]], *, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Run token ids, padded with ``pad``, without a cache or adapters.

        Returns:
            The last layer's states after the final norm, left-padded, of shape (rows, padded tokens, hidden size); and
            the mask of shape (rows, padded tokens), 1 where a row has a token.
        """
        tokens, mask, positions = _left_padded(ids, 0, pad)
        arguments: dict[str, object] = {
            "input_ids": tokens.to(self.device),
            "attention_mask": mask.to(self.device),
            "use_cache": False,
        }
        if self._positions:
            arguments["position_ids"] = positions.to(self.device)
        nobody: list[str | None] = [None] * len(ids)
        with self.adapters.using(nobody, tokens.shape[1]) if self.adapters is not None else nullcontext():
            states: torch.Tensor = self.module.base_model(**arguments)[0]
        return states, mask.to(self.device)

    def _forward(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
        adapters: list[str | None],
        *,
        last_only: bool,
        states: bool,
        experts: bool,
        media: MediaPass | None = None,
        before_head: bool = False,
    ) -> Computed:
        if not self._attends:
            mask = mask[:, -tokens.shape[1] :]  # a recurrent layer looks at the new tokens alone
        arguments: dict[str, object] = {
            "input_ids": tokens.to(self.device),
            "attention_mask": mask.to(self.device),
            self._cache_name: cache,
            "use_cache": True,
        }
        if self._positions:
            arguments["position_ids"] = positions.to(self.device)
        if self._keeps_logits and last_only:
            arguments["logits_to_keep"] = 1
        last: list[torch.Tensor] = []
        layers: list[torch.Tensor] = []
        with ExitStack() as during:
            if media is not None:
                arguments.update(media.inputs())
                during.enter_context(media.running())
            if self.adapters is not None:
                during.enter_context(self.adapters.using(adapters, tokens.shape[1]))
            if states:
                head = self.module.get_output_embeddings()
                if head is None:
                    raise EngineInternalError(f"{type(self.module).__name__} names no head, whose input is wanted")
                kept = head.register_forward_pre_hook(lambda _, given: last.append(given[0][:, -1]))
                during.callback(kept.remove)
            chosen = during.enter_context(self.choices.recorded(len(tokens))) if experts else []
            if before_head:
                listening = self.module.base_model.register_forward_hook(
                    lambda _, __, output: layers.append(output.last_hidden_state)
                )
                during.callback(listening.remove)
            logits: torch.Tensor = self.module(**arguments).logits
        return Computed(
            logits,
            last[0] if states else None,
            torch.stack(chosen, dim=2) if chosen else None,
            layers[-1] if layers else None,
        )

    def cache_identity(self, adapter: str | None, tokens: int) -> int:
        """Return the prefix-cache key for a row of this length: rows with the same key may share prefixes."""
        identity = self.adapters.identity(adapter) if self.adapters is not None else 0
        return 2 * identity + self.is_long(tokens)

    def is_long(self, tokens: int) -> bool:
        """Return True if a row of this length uses longrope's long factors."""
        return self.short_length is not None and tokens > self.short_length

    def release_unused_memory(self) -> None:
        """Return unused memory to the operating system or the GPU."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            trim_heap()


def _loader(config: EngineConfig) -> Any:
    """Return the class of transformers that loads the model for its task."""
    if config.task is Task.REWARD:
        return AutoModelForSequenceClassification
    if config.task is Task.EMBED:
        own = AutoConfig.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
        # With its head, a model has the tensors' names of its checkpoint; some checkpoints were saved without one.
        if not any("ForCausalLM" in name or "LMHead" in name for name in own.architectures or ()):
            return AutoModel
    media = media_capabilities(config)
    if Capability.AUDIO in media:
        return AutoModelForMultimodalLM
    return AutoModelForImageTextToText if Capability.IMAGES in media else AutoModelForCausalLM


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Join the positions of consecutive passes, each of shape (rows, positions, …)."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _left_padded(ids: list[list[int]], prefix: int, pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, mask and positions of rows that follow ``prefix`` cached tokens; the mask covers those too."""
    longest = max(map(len, ids))
    tokens = torch.full((len(ids), longest), pad, dtype=torch.long)
    mask = torch.ones(len(ids), prefix + longest, dtype=torch.long)
    for row, own in enumerate(ids):
        tokens[row, longest - len(own) :] = torch.tensor(own)
        mask[row, prefix : prefix + longest - len(own)] = 0
    return tokens, mask, (mask.cumsum(-1) - 1).clamp_min(0)[:, prefix:]


def _refuse_other_state(module: PreTrainedModel) -> None:
    """Refuse models whose state cannot be moved between batches row by row."""
    layers = DynamicCache(config=module.config).layers
    odd = {type(layer).__name__ for layer in layers if not _is_movable(layer)}
    if odd or (getattr(module, "_is_stateful", False) and not any(map(is_recurrent, layers))):
        raise EngineStartError(
            f"{type(module).__name__} keeps state ({', '.join(sorted(odd)) or 'stateful'}) that the transformers "
            f"backend cannot batch with transformers {transformers.__version__}; use another backend for this model"
        )


def _is_movable(layer: object) -> bool:
    names = {cls.__name__ for cls in type(layer).__mro__}
    if "LinearAttentionCacheLayerMixin" in names:
        return is_recurrent(layer)
    return "DynamicIndexedLayer" not in names


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the distance of logits, as a share of the second's norm."""
    one, other = (logits.float() - logits.float().mean(-1, keepdim=True) for logits in (one, other))
    return float((one - other).norm() / other.norm())


def _own_storages(module: PreTrainedModel) -> None:
    """Copy tensors that are views of a mapped file: such tensors cannot be updated, nor their memory freed."""
    for parameter in module.parameters():
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer is not None and not buffer.untyped_storage().resizable():
                setattr(owner, name, buffer.clone())


def _zero_padding(cache: Cache, mask: torch.Tensor) -> None:
    """Zero keys and values of padding: a NaN there would spread through attention even where it is masked."""
    for keys, values in keys_and_values(cache):
        padding = (mask == 0).to(keys.device)[:, None, :, None]
        keys.masked_fill_(padding, 0)
        values.masked_fill_(padding, 0)
