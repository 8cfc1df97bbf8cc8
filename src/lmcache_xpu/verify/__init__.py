"""Whether a KV connector gives back what was computed: every block by its bytes, and the answers.

`asking` asks an engine and keeps digests of its blocks; `cases` are the jobs of an engine with the
connector; `judge` compares them with each other, and with an engine that has no connector.
"""
