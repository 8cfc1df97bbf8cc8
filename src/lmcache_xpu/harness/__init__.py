"""The demo: a small model, a real engine, a client that measures, and the story they tell."""
