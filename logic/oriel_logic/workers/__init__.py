"""CPU work in a bounded set of worker processes.

pool (in the logic process)  -- assigns jobs to workers; one job per worker at a time
launch (in the logic process) -- starts the fork server and requests workers from it
forkserver (its own process) -- imports the services once, forks a worker per request
child (in a worker)          -- runs jobs, one after the other
frames                       -- the bytes between pool and child
"""
