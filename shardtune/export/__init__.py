"""Taking a model elsewhere: Hugging Face folders, GGUF, vLLM, Ollama, the hub; each read back."""
