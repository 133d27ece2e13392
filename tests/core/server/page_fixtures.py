"""Fixtures of the page's tests: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from browsing import CONTEXT, Answering, opened
from running import Running, serving

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served(speaking) -> Iterator[Running]:
    """Its answers end with the context."""
    with serving(speaking, max_context=CONTEXT) as running:
        yield running


@pytest.fixture
def profile(browser: Any) -> Iterator[Any]:
    """A browser's profile whose pages must not raise or violate the policy."""
    profile = browser.new_context(viewport={"width": 1280, "height": 800})
    profile.set_default_timeout(30_000)
    errors: list[str] = []
    profile.on("weberror", lambda error: errors.append(str(error.error)))
    profile.on("console", lambda said: errors.append(said.text) if "Policy" in said.text else None)
    yield profile
    profile.close()
    assert errors == []


@pytest.fixture
def answering(profile: Any) -> Answering:
    return Answering(profile)


@pytest.fixture
def page(profile: Any, answering: Answering) -> Any:
    return opened(profile)
