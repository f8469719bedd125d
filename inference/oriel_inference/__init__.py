"""The inference server: models behind the v2 protocol.

Its rooms from the top down; a module imports only from its own room and from those below it:

command                                     the process: flags, signals, exit status
app, settings, flags, start_report          the unit put together, and what it is started with
servers, metrics, host, log_settings        HTTP and gRPC <-> requests; the control port
control, rollout, load_slots                which models are loaded when, and how versions replace one another
dataplane, scripting                        one request from its decoded form to its answer
repository                                  a model's configuration and files -> a version that is ready to serve
ensembles                                   models made of models
lifecycle, fitting                          the catalog of what serves, and whether a request fits a model
batching                                    the queue and the instances of one model version
backends, stores                            runtimes; where model files lie
clock, model                                values that all of them use
errors
"""
