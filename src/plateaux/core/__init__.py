"""Types, errors, the plug-in registry, tensor trees, the contracts (method, metric, executor), and the runtime.

Every other package imports from here. Nothing here imports from another package of Plateaux."""
