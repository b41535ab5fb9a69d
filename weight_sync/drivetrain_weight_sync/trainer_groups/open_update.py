"""An update between its first bucket and its commit: the tensors that have come, and those that are missing."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from drivetrain.errors import InvalidRequest, WeightPlanMismatch
from drivetrain.types.weights import TensorSpec, WeightManifest
from drivetrain_weight_sync.copying.digest import digest
from drivetrain_weight_sync.copying.plan import check_plan
from drivetrain_weight_sync.tensors.checkpoint_names import listed, unwrapped
from drivetrain_weight_sync.tensors.dtypes import dtype_of, rounds, spec_of, widens
from drivetrain_weight_sync.trainer.in_memory_names import InMemoryNames
from drivetrain_weight_sync.trainer_groups.bucket import WeightBucket


class OpenUpdate:
    """Collects the tensors of one update.

    Args:
        manifest: The engine's tensors.
        names: Translates names of a model in memory to those of its checkpoint.
        cast: Take floating-point tensors that are to be rounded to the engine's dtype.
        explicit: True if the trainer said when the update begins, so that it also says when it ends.
    """

    def __init__(self, manifest: WeightManifest, names: InMemoryNames, *, cast: bool, explicit: bool = False) -> None:
        self._manifest = manifest
        self._expected = {spec.name: spec for spec in manifest.tensors}
        self._names = names
        self._cast = cast
        self._arrived: set[str] = set()
        """Names in the manifest of the tensors that have come."""
        self._announced: set[str] = set()
        """Names of every bucket, as the trainer wrote them."""
        self._refusal = ""
        self.explicit = explicit
        self.failed = False
        """True if the trainer was told of a refusal, or of a commit that failed."""
        self.tensors: dict[str, torch.Tensor] = {}
        self.rounded: set[str] = set()
        """Pairs of dtypes, as ``float32 to bfloat16``, of the tensors that are rounded."""
        self.version: str | None = None
        self.abort_requests = False

    def for_bucket(self, bucket: WeightBucket) -> OpenUpdate:
        """Return the update that ``bucket`` belongs to: this one, or a new one if the trainer has started over.

        A trainer sends each tensor once per update, and starts over once it was told of a failure. Tensors that came
        before may be of older weights, so they are dropped.
        """
        names = {spec.name for spec in bucket.specs}
        if (self.failed and not self.explicit) or not names.isdisjoint(self._announced):
            return OpenUpdate(self._manifest, self._names, cast=self._cast, explicit=self.explicit)
        return self

    def check(self, bucket: WeightBucket) -> set[str]:
        """Check names, dtypes and shapes before the tensors come; return the manifest's names of the tensors.

        Raises:
            InvalidRequest: The bucket holds a name twice, or says itself why it cannot be taken.
            WeightPlanMismatch: The engine has no such tensor, or one of another shape or a dtype that would be rounded.
        """
        if bucket.refusal:
            raise InvalidRequest(bucket.refusal)
        names = [unwrapped(spec.name) for spec in bucket.specs]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise InvalidRequest(f"names holds {listed(twice)} twice; give each tensor once", field="names")
        stored = self._stored(bucket.specs)
        for spec in stored:
            self._require_fits(spec)
        return {self._main(spec.name) for spec in stored}

    def _stored(self, specs: tuple[TensorSpec, ...]) -> list[TensorSpec]:
        """Return the tensors by their checkpoint names."""
        try:
            given = {
                unwrapped(spec.name): torch.empty(spec.shape, dtype=dtype_of(spec), device="meta") for spec in specs
            }
        except (RuntimeError, OverflowError) as error:
            raise InvalidRequest(f"shapes holds sizes that no tensor has: {error}", field="shapes") from None
        return [spec_of(name, tensor) for name, tensor in self._names.stored(given, self._manifest).items()]

    def _require_fits(self, spec: TensorSpec) -> None:
        wanted = self._expected.get(self._main(spec.name))
        one = WeightManifest((wanted,) if wanted else (), self._manifest.aliases)
        if wanted is not None:
            rounded = self._cast and rounds(dtype_of(spec), dtype_of(wanted))
            if rounded:
                self.rounded.add(f"{spec.dtype} to {wanted.dtype}")
            if rounded or widens(dtype_of(spec), dtype_of(wanted)):
                spec = TensorSpec(spec.name, wanted.dtype, spec.shape)
        check_plan([spec], one)

    def _main(self, name: str) -> str:
        return self._manifest.aliases.get(name, name)

    def take(self, bucket: WeightBucket, tensors: Mapping[str, torch.Tensor], names: set[str]) -> None:
        """Add tensors that have come; ``names`` is what :meth:`check` returned for them."""
        self._note(bucket)
        self.tensors.update(tensors)
        self._arrived.update(names)

    def refuse(self, bucket: WeightBucket, reason: str) -> None:
        """Record that a bucket was refused: the update can no longer be committed."""
        self._note(bucket)
        self.failed = True
        self._refusal = self._refusal or reason

    def _note(self, bucket: WeightBucket) -> None:
        self._announced.update(spec.name for spec in bucket.specs)
        self.version = bucket.version or self.version
        self.abort_requests = self.abort_requests or bucket.abort_requests

    @property
    def complete(self) -> bool:
        """True if every tensor has come, and none was refused."""
        return not self._refusal and self._expected.keys() <= self._arrived

    def require_complete(self) -> None:
        """Raise unless the update can be committed.

        Raises:
            InvalidRequest: A bucket was refused.
            WeightPlanMismatch: Tensors are missing.
        """
        if self._refusal:
            raise InvalidRequest(
                f"the update holds a bucket that was refused, so nothing was changed; send every tensor again. The "
                f"refusal: {self._refusal}"
            )
        missing = [name for name in self._expected if name not in self._arrived]
        if missing:
            raise WeightPlanMismatch(
                f"{len(missing)} of {len(self._expected)} tensors have not come, so nothing was changed: "
                f"{listed(missing)}; send them too",
                missing=missing,
            )

    def tied(self) -> TiedTensors:
        """Return the digests of the tied tensors that have come, for names of theirs that come after the commit."""
        given = {unwrapped(name): tensor for name, tensor in self.tensors.items()}
        stored = self._names.stored(given, self._manifest)
        aliases = self._manifest.aliases
        mains = {self._main(name): tensor for name, tensor in stored.items() if self._main(name) in aliases.values()}
        dtypes = {main: dtype_of(self._expected[main]) for main in mains}
        return TiedTensors(aliases, dtypes, {main: digest(mains[main].to(dtypes[main])) for main in mains})


class TiedTensors:
    """Digests of the tied tensors of a committed update."""

    def __init__(
        self, aliases: Mapping[str, str], dtypes: Mapping[str, torch.dtype], digests: Mapping[str, int]
    ) -> None:
        self._aliases = aliases
        self._dtypes = dtypes
        self._digests = digests

    def hold(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether ``tensors`` are second names of tied tensors, with the values that were committed."""
        return all(self._holds(unwrapped(name), tensor) for name, tensor in tensors.items())

    def _holds(self, name: str, tensor: torch.Tensor) -> bool:
        main = self._aliases.get(name, "")
        return main in self._digests and digest(tensor.to(self._dtypes[main])) == self._digests[main]
