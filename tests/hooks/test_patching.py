from __future__ import annotations

from typing import Any

from ppdiag.hooks.patching import Patches


class Base:
    def inherited(self) -> str:
        return "base"


class Owner(Base):
    def own(self) -> str:
        return "own"


def test_restore_gives_back_the_very_same_attributes() -> None:
    before = dict(vars(Owner))
    patches = Patches()
    patches.replace(Owner, "own", lambda _: "ours")
    patches.replace(Owner, "inherited", lambda _: "ours")
    assert (Owner().own(), Owner().inherited()) == ("ours", "ours")
    patches.restore()
    assert dict(vars(Owner)) == before
    assert not patches


def test_a_wrapper_that_somebody_put_around_ours_stays() -> None:
    original = vars(Owner)["own"]
    patches = Patches()
    patches.replace(Owner, "own", original)
    ours: Any = vars(Owner)["own"]

    def theirs(self: Owner) -> str:
        return f"theirs({ours(self)})"

    Owner.own = theirs  # type: ignore[method-assign]
    patches.restore()
    assert Owner().own() == "theirs(own)"
    Owner.own = original  # type: ignore[method-assign]
