"""The rule that splits the tests into two tiers; see tiers.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiers import cover


def test_a_cover_has_every_value_in_few_combinations() -> None:
    sets = [{("a", i), ("b", j)} for i in range(3) for j in range(5)]
    chosen = cover(sets)
    assert len(chosen) == 5
    assert set().union(*(sets[i] for i in chosen)) == set().union(*sets)
    assert cover(sets) == chosen


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest("pytest_plugins = ['tiers']")
    markers = "".join(f"    {name}\n" for name in ("nightly", "each_value", "each_pair"))
    pytester.makeini(f"[pytest]\npythonpath = {Path(__file__).parent}\nmarkers =\n{markers}")
    return pytester


def test_the_first_tier_has_each_value_and_no_nightly_test(suite: pytest.Pytester) -> None:
    suite.makepyfile("""
        import pytest

        @pytest.mark.each_value("six combinations")
        @pytest.mark.parametrize("a", [1, 2])
        @pytest.mark.parametrize("b", [3, 4, 5])
        def test_all(a, b):
            pass

        @pytest.mark.each_pair("eight combinations")
        @pytest.mark.parametrize("a", [1, 2])
        @pytest.mark.parametrize("b", [3, 4])
        @pytest.mark.parametrize("c", [5, 6])
        def test_pairs(a, b, c):
            pass

        @pytest.mark.nightly("slow", but=["two"])
        @pytest.mark.parametrize("a", ["one", "two", "three"])
        def test_slow(a):
            pass

        @pytest.mark.nightly("slow")
        def test_slower():
            pass

        def test_quick():
            pass
    """)
    suite.runpytest("-m", "not nightly").assert_outcomes(passed=9, deselected=10)
    suite.runpytest().assert_outcomes(passed=19)


def test_a_combination_that_is_skipped_covers_nothing(suite: pytest.Pytester) -> None:
    suite.makepyfile("""
        import pytest

        absent = pytest.param("absent", marks=pytest.mark.skipif(True, reason="not here"))

        @pytest.mark.each_value("nine combinations")
        @pytest.mark.parametrize("a", [absent, "one", "two"])
        @pytest.mark.parametrize("b", [3, 4, 5])
        def test_all(a, b):
            pass
    """)
    suite.runpytest("-m", "not nightly").assert_outcomes(passed=3, deselected=6)
    suite.runpytest().assert_outcomes(passed=6, skipped=3)


@pytest.mark.parametrize(
    "mark", ["nightly", "nightly(but=['a'])", "each_value(3)", "each_pair()", "nightly('')"]
)
def test_a_mark_without_a_reason_is_refused(suite: pytest.Pytester, mark: str) -> None:
    suite.makepyfile(f"import pytest\n\n@pytest.mark.{mark}\ndef test_it():\n    pass\n")
    result = suite.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "test_it: the mark" in result.stderr.str() + result.stdout.str()


@pytest.mark.parametrize(
    ("mark", "sentence"),
    [
        ("nightly('slow', buts=['one'])", "does not know ['buts']"),
        ("nightly('slow', but='one')", "takes a list of ids as but, got 'one'"),
        ("nightly(' ')", "needs its reason"),
        ("each_pair('many')", "needs a test with at least 2 arguments, this one has 1"),
        ("each_value('many')\n@pytest.mark.each_pair('many')", "give one of the marks"),
    ],
)
def test_a_mark_that_has_no_effect_is_refused(
    suite: pytest.Pytester, mark: str, sentence: str
) -> None:
    suite.makepyfile(f"""
import pytest

@pytest.mark.{mark}
@pytest.mark.parametrize("a", ["one", "two"])
def test_it(a):
    pass
""")
    result = suite.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert sentence in result.stderr.str() + result.stdout.str()


def test_but_belongs_to_a_function(suite: pytest.Pytester) -> None:
    suite.makepyfile("""
        import pytest

        @pytest.mark.nightly("slow", but=["one"])
        class TestAll:
            @pytest.mark.parametrize("a", ["one", "two"])
            def test_it(self, a):
                pass
    """)
    result = suite.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "has but on a class or module" in result.stderr.str() + result.stdout.str()


def test_an_id_that_no_test_has_is_refused(suite: pytest.Pytester) -> None:
    suite.makepyfile("""
        import pytest

        @pytest.mark.nightly("slow", but=["one", "for"])
        @pytest.mark.parametrize("a", ["one", "two", "four"])
        def test_it(a):
            pass
    """)
    result = suite.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = result.stderr.str() + result.stdout.str()
    assert "test_it: the mark nightly names ['for'] in but" in text
    # A single test is run alone, whatever the ids of the others.
    suite.runpytest("test_an_id_that_no_test_has_is_refused.py::test_it[two]").assert_outcomes(
        passed=1
    )
