"""The service port of the logic server: connections, requests, answers, releases, and the pipeline between them."""
