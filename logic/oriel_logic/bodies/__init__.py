"""Bodies of requests and answers, one file per kind. Each is bounded before it costs memory and raises Refused."""
