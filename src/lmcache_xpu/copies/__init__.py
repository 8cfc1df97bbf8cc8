"""A worker's copies: LOCATE, COPY, CHECK and REPORT."""
