"""How hot a board is, from trees like those of real boards."""

from __future__ import annotations

from pathlib import Path

from agent.device.thermal import Cooling, Frequency, Zone, read_thermal


def put(root: Path, **files: str) -> None:
    """Files below `root`; `__` stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")


def pi(root: Path, *, cpu: str = "54000", fan: int = 0, limit: int = 2_400_000) -> None:
    """As a Raspberry Pi 5 with a fan has it."""
    zone = "sys__class__thermal__thermal_zone0__"
    put(
        root,
        **{f"{zone}type": "cpu-thermal\n", f"{zone}temp": f"{cpu}\n"},
        **{f"{zone}trip_point_0_type": "critical\n", f"{zone}trip_point_0_temp": "110000\n"},
        **{f"{zone}trip_point_1_type": "active\n", f"{zone}trip_point_1_temp": "50000\n"},
        **{f"{zone}trip_point_2_type": "passive\n", f"{zone}trip_point_2_temp": "85000\n"},
        sys__class__thermal__cooling_device0__type="pwm-fan\n",
        sys__class__thermal__cooling_device0__cur_state=f"{fan}\n",
        sys__class__thermal__cooling_device0__max_state="4\n",
        sys__devices__system__cpu__cpufreq__policy0__affected_cpus="0 1 2 3\n",
        sys__devices__system__cpu__cpufreq__policy0__scaling_cur_freq="1500000\n",
        sys__devices__system__cpu__cpufreq__policy0__scaling_max_freq=f"{limit}\n",
        sys__devices__system__cpu__cpufreq__policy0__cpuinfo_max_freq="2400000\n",
    )


def test_a_board_that_is_well(tmp_path: Path) -> None:
    pi(tmp_path, fan=2)
    thermal = read_thermal(tmp_path)
    assert thermal.zones == (Zone("cpu-thermal", 54.0, 85.0, 110.0),)
    assert thermal.cooling == (Cooling("pwm-fan", 2, 4),)
    assert thermal.frequencies == (Frequency("0 1 2 3", 1500.0, 2400.0, 2400.0),)
    assert (thermal.hottest_c, thermal.margin_c) == (54.0, 31.0)
    # A fan that turns takes no speed away.
    assert not thermal.throttled


def test_a_limit_below_what_cores_can_do(tmp_path: Path) -> None:
    pi(tmp_path, cpu="86500", limit=1_500_000)
    thermal = read_thermal(tmp_path)
    assert thermal.throttled
    assert thermal.margin_c == -1.5


def test_a_processor_that_cools(tmp_path: Path) -> None:
    pi(tmp_path)
    put(
        tmp_path,
        sys__class__thermal__cooling_device1__type="cpufreq-cpu0\n",
        sys__class__thermal__cooling_device1__cur_state="3\n",
        sys__class__thermal__cooling_device1__max_state="8\n",
    )
    assert read_thermal(tmp_path).throttled


def test_what_is_broken_is_left_out(tmp_path: Path) -> None:
    """A sensor that reads as -256 C, one that is no number, and a zone that has none."""
    pi(tmp_path)
    put(
        tmp_path,
        sys__class__thermal__thermal_zone1__temp="-256000\n",
        sys__class__thermal__thermal_zone2__temp="oops\n",
        sys__class__thermal__thermal_zone3__type="tj-thermal\n",
        sys__class__thermal__thermal_zone10__temp="30500\n",
    )
    assert [zone.name for zone in read_thermal(tmp_path).zones] == ["cpu-thermal", "thermal_zone10"]


def test_a_board_that_says_nothing(tmp_path: Path) -> None:
    thermal = read_thermal(tmp_path)
    assert (thermal.zones, thermal.cooling, thermal.frequencies) == ((), (), ())
    assert (thermal.hottest_c, thermal.margin_c, thermal.throttled) == (None, None, False)
