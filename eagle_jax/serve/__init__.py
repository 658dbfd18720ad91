"""The HTTP endpoint, in OpenAI's protocol, on one scheduler (extra `serve`)."""
