"""The admin port: health, metrics, the queues and the calls under way, behind a guard."""
