"""telegrad in the place of torch's RPC, for programs that know nothing of telegrad.

    install()                                    from now on, in this process and in those that it starts
    python -m telegrad.compat script.py ARGS     the same for a whole script

Names inside of torch's own modules are replaced, so `import torch.distributed.rpc as rpc` gives the same module as
ever, with telegrad's functions in it. Code that has imported single names before gets telegrad's as well.

    replacing.py   install(): which name of which module becomes what
    agent.py       a Worker as torch's Python code expects an RPC agent
    calls.py       rpc_sync, rpc_async, remote, with what torch's do besides calling
    profiling.py   torch's profilers
"""

from .profiling import follow_profiles
from .replacing import install, is_installed

__all__ = ["follow_profiles", "install", "is_installed"]
