import pytest, tiny
from tiny import *
from test_optimizers import settings
MOE = LLAMA | {"num_layers": 2, "num_experts": 3, "experts_per_token": 2, "expert_ffn_size": 8}
@pytest.mark.parametrize("name", ["adafactor","muon"])
@pytest.mark.parametrize("te", [(SHARD3,),(TENSOR,),(SHARD3,TENSOR)], ids=tiny.joined)
def test_x(name, te, ran):
    a = ran(plan_of(*te, microbatch=2), MOE, optimizer=settings(name))
    assert tiny.departures(a, tiny.bounds(EXACT)) == []
    assert tiny.price_differences(a[:1] if name == "adafactor" else a) == []
