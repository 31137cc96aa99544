# Sourced by the scripts beside it: makes the repository's own virtual environment, and installs Debian packages.
# Needs Python >= 3.10 with pip; nothing outside the repository changes except by apt-get, where that is said.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
program=scripts/$(basename "$0")

fail() {
    echo "$program: error: $*" >&2
    exit 1
}

say() {
    echo "$program: $*" >&2
}

# apt_install PACKAGE...: install what is missing; fails with the command to type when that needs more rights.
apt_install() {
    local as_root=() missing=()
    local package
    for package in "$@"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    if ((EUID != 0)); then
        sudo -n true 2>/dev/null || fail "these packages are missing: sudo apt-get install ${missing[*]}"
        as_root=(sudo)
    fi
    say "installing ${missing[*]} with apt-get"
    local log
    log=$(mktemp)
    if ! {
        "${as_root[@]}" apt-get update -qq &&
            DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}"
    } >"$log" 2>&1 </dev/null; then
        tail -n 3 "$log" >&2
        rm -f "$log"
        fail "apt-get could not install ${missing[*]}"
    fi
    rm -f "$log"
}

# find_promtool: put promtool in the PATH. Debian has it in the package prometheus, whose server nobody needs here (it
# would be started), so that one program is unpacked into .cache/bin.
find_promtool() {
    local bin=$root/.cache/bin folder
    command -v promtool >/dev/null && return 0
    if [[ ! -x $bin/promtool ]]; then
        folder=$(mktemp -d)
        (cd "$folder" && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb .) >/dev/null 2>&1 || true
        mkdir -p "$bin"
        mv "$folder/usr/bin/promtool" "$bin/promtool" 2>/dev/null || true
        rm -rf "$folder"
    fi
    [[ -x $bin/promtool ]] && export PATH=$bin:$PATH
}

# make_venv EXTRAS: .venv with this project and the named extras, and activate it. The second time it only looks at a
# stamp: a hash of pyproject.toml, the extras and the interpreter.
make_venv() {
    local extras=$1 python=${PYTHON:-python3} venv=$root/.venv
    command -v "$python" >/dev/null || fail "$python is not installed (Python >= 3.10 is needed; set PYTHON to choose one)"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$("$python" --version) is too old: Python >= 3.10 is needed (set PYTHON to choose another)"
    # Two scripts started at once must not build one environment together.
    mkdir -p "$root/.cache"
    exec 9>"$root/.cache/setup.lock"
    flock 9
    local wanted stamp=$venv/.tightfit-$extras
    wanted=$({ cat "$root/pyproject.toml"; echo "$extras"; "$python" -VV; echo "$root"; } | sha256sum)
    if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
        say "preparing .venv with [$extras] (once; some minutes)"
        if [[ ! -x $venv/bin/python || $("$venv/bin/python" -VV 2>&1) != "$("$python" -VV)" ]]; then
            if ! "$python" -m venv --clear "$venv" >/dev/null 2>&1; then
                # Debian keeps ensurepip in a package of its own.
                apt_install python3-venv
                "$python" -m venv --clear "$venv" >/dev/null || fail "$python -m venv failed"
            fi
        fi
        "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input -e "$root[$extras]" 9>&- ||
            fail "pip could not install the dependencies (is the package index reachable?)"
        echo "$wanted" >"$stamp"
    fi
    exec 9>&-
    export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
    unset PYTHONHOME
}
