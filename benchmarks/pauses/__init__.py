"""Paused sessions: how many resumes find what they had attendable, with hints and without."""
