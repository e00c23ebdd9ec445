"""What this machine gives, measured or looked up: `names.cluster("8xh100")`, `machine.probe(...)`.

Only `measure`, which runs in processes of its own, imports torch.
"""

from meshwright.core.room import make_callable

make_callable(__name__, "meshwright.probe.machine", "probe")
