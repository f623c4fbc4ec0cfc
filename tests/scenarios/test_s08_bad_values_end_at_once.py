"""S08: impossible values end the program before training, with the key and the value on screen."""

import sys
from pathlib import Path

import pytest

from fl_app import cli
from fl_app.engines.local import LocalEngine

CENTRAL = "mechanism=central_gaussian"
BAD = [
    *(([f"privacy.target_epsilon={v}"], f"privacy.target_epsilon={v}")
      for v in ("0", "nan", "inf", "-1")),
    (["privacy.target_epsilon='1e-5 '"], "privacy.target_epsilon=1e-5 "),
    *(([f"privacy.target_delta={v}"], f"privacy.target_delta={v}") for v in ("0", "1", "2", "nan")),
    *(([CENTRAL, f"mechanism.clipping_norm={v}"], f"mechanism.clipping_norm={v}")
      for v in ("0", "nan", "inf")),
    *(([f"training.clipping_norm={v}"], f"training.clipping_norm={v}")
      for v in ("0", "nan", "inf")),
    ([CENTRAL, "mechanism.noise_multiplier=-1"], "mechanism.noise_multiplier=-1"),
    (["training.noise_multiplier=-1"], "training.noise_multiplier=-1"),
]  # fmt: skip


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(("overrides", "named"), BAD, ids=lambda v: str(v)[:50])
def test_s08_impossible_values(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    overrides: list[str],
    named: str,
) -> None:
    started: list[object] = []
    monkeypatch.setattr(LocalEngine, "run", lambda self, settings: started.append(settings))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dpfl", command, *overrides])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code not in (0, None)
    assert named in capsys.readouterr().err
    assert started == []
    assert list(tmp_path.iterdir()) == []
