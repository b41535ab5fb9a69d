"""Images and videos that come with prompts: fetching, decoding, and cutting into patches."""
