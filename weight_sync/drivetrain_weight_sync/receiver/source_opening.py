"""Open the source of an update, without stopping the engine if that takes long."""

from __future__ import annotations

import threading

from drivetrain.types.weights import WeightManifest, WeightUpdateRequest
from drivetrain_weight_sync.transports.base import Opened, Reader


class SourceOpening:
    """Opens a source, in a separate thread if the reader ``takes_long``."""

    def __init__(self, reader: Reader, request: WeightUpdateRequest, manifest: WeightManifest) -> None:
        self.reader = reader
        self.request = request
        self._manifest = manifest
        self._opened: Opened | None = None
        self._error: Exception | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if reader.takes_long:
            self._thread = threading.Thread(target=self._open, name="drivetrain-opens-source", daemon=True)
            self._thread.start()
        else:
            self._open()

    def _open(self) -> None:
        try:
            opened = self.reader.open(self.request, self._manifest)
        except Exception as error:
            self._error = error
        else:
            self._opened = opened
        with self._lock:
            if self._given_up:
                self.reader.close()

    @property
    def under_way(self) -> bool:
        """True until the source was opened, or could not be."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the source was opened, or could not be."""
        if self._thread is not None:
            self._thread.join()

    def result(self) -> Opened:
        """Return the opened source, or raise the error of opening it."""
        if self._error is not None:
            raise self._error
        assert self._opened is not None
        return self._opened

    def give_up(self) -> bool:
        """Have the opening thread close the reader when it ends; return False if it has already ended."""
        with self._lock:
            self._given_up = self.under_way
        return self._given_up
