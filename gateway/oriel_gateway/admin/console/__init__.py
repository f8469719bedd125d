"""The console of the admin port and of `oriel top`: one bounded snapshot a second of all that people look at.

`recent` counts the calls of the last minute, `reading` collects what the gateway knows, `snapshot` bounds it (pure),
`live` sends it to viewers, `tenants` answers for one tenant, `pages` holds the three static files.
"""
