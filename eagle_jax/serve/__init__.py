"""The HTTP endpoint, in OpenAI's protocol, on one engine (extra `serve`)."""
