"""What tests of several commands use."""

import sys

import pytest


@pytest.fixture
def aura(monkeypatch, capsys, tmp_path):
    """Run `aura ARGUMENTS` in an empty folder, `tmp_path`; returns (exit status, stdout, stderr)."""
    from aura_ros import cli

    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["aura", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return (end.value.code or 0, *capsys.readouterr())

    return run
