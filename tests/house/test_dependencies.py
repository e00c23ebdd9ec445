"""What the package needs: few, free, and fitting each other. (`make audit` asks for known vulnerabilities as well.)"""

from __future__ import annotations

from benchmarks.reliability_security import dependency_problems, hard_dependencies


def test_dependencies_are_few_free_and_fit_each_other() -> None:
    assert "torch" in hard_dependencies()
    assert dependency_problems() == []
