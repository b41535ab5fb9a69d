"""Images, videos and sounds in prompts."""
