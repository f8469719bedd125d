"""The gateway: the public server in front of logic and inference servers.

A call is identified, routed, counted against its limits, queued for a permit and sent; its head is judged before its
body is read. Folders, from the outside in:

ingress, admin      connections of clients; the admin port
core                the state that all calls of one process share
shared              work that several calls share: kept answers, single flights, shadow copies
call                one call from its authorised head to its last byte
pools, observe      upstream servers and their permits; records of what happened
limits              limits of tenants, in one process or shared through Redis
identity, routing   callers and their keys; from a request line to a target
documents           policy documents: sources, compilation, reload
api_docs            the pages that describe the API
"""
