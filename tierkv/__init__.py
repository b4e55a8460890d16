"""tierkv: a tiered KV-cache memory manager for LLM agents. This package is what a worker imports."""
