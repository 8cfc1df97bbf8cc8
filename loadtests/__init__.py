"""The load test: Locust users that hold conversations, and what they measured."""
