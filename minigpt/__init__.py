"""minigpt: from raw text to a small language model of your own, and back to text."""

__version__ = "0.1.0"
