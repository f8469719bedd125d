"""The `oriel` command: dispatch, the supervisor behind `oriel up`, the local trace buffer, the demo."""
