"""Any legal call, drawn by hypothesis: every implementation equals the reference, byte for byte."""

from __future__ import annotations

from typing import Any

import cases
import compare
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@st.composite
def calls(draw: st.DrawFn) -> cases.Case:
    chosen: dict[str, Any] = {}
    for name, values in cases.FACTORS.items():
        legal = [v for v in values if cases.legal({**chosen, name: v})]
        chosen[name] = draw(st.sampled_from(legal or [values[0]]))
    if not cases.legal(chosen):
        chosen = {**chosen, "state": "W", "snapshots": "windows", "slots": None}
    return cases.make_case(
        draw(st.integers(4, 7)), draw(st.integers(2, 19)), seed=draw(st.integers(0, 999)), **chosen
    )


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(case=calls())
def test_any_call_equals_the_reference(built, case):
    compare.assert_same_case(cases.run(built, case), cases.run("reference", case), built)
