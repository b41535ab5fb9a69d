"""Images and videos beside a prompt: their bytes, their frames, their patches."""
