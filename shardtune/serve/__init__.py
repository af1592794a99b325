"""Answers for many at once: continuous batching, OpenAI's HTTP interface, a page, a terminal chat.

What is served is handed in as `ServedModel`: this room loads nothing, and knows no run.
"""
