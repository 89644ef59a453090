"""A client's text: chat templates, sampling, speculation, and the OpenAI-compatible endpoint.

Used by the commands `chat` and `proxy` and by private generation; start at `writer.py`.
"""
