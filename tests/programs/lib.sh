# shellcheck shell=bash
# What families use: packages, sources, programs under the card, verdicts.

# need COMMAND:PACKAGE...: a command is a name, or the path of a file (a pattern). Installs what is missing, or returns 77
# and says what.
need() {
    local -a missing
    find_missing "$@"
    ((${#missing[@]})) || return 0
    if ((EUID == 0)) && command -v apt-get >/dev/null; then
        echo "installs ${missing[*]#*:}"
        timeout 300 apt-get -qq update >/dev/null 2>&1 || true
        DEBIAN_FRONTEND=noninteractive timeout 600 apt-get -qq --yes --no-install-recommends install "${missing[@]#*:}" \
            >/dev/null 2>&1 && find_missing "$@" && ((${#missing[@]} == 0)) && return
    fi
    # A package may lack what another release's has.
    echo "skipped: there is no ${missing[*]%%:*} (packages ${missing[*]#*:})"
    return 77
}

find_missing() {
    local pair command
    missing=()
    for pair; do
        command=${pair%%:*}
        compgen -G "$command" >/dev/null || command -v "$command" >/dev/null || missing+=("$pair")
    done
}

# source_of ADDRESS COMMIT FOLDER: the sources of a commit. SOURCES=FOLDER may have repositories by the last part of their address.
source_of() {
    local address=$1
    [ -z "${SOURCES:-}" ] || address=$SOURCES/$(basename "$1")
    git init --quiet "$3" && git -C "$3" fetch --quiet --depth 1 "$address" "$2" && git -C "$3" checkout --quiet FETCH_HEAD && return
    echo "skipped: cannot fetch $2 of $address"
    exit 77
}

# card LINK PROGRAM ARGUMENT...: a program on the card, which ends within the family's patience.
card() {
    timeout --kill-after=5 "$patience" "$GDASYNC" card --link "$1" "${@:2}"
}

# report NAME STATUS PATTERN FILE SINCE: a line with the verdict. The program's own words must have the pattern.
report() {
    local name=$1 status=$2 pattern=$3 file=$4 took=$((SECONDS - $5)) verdict=ok
    case $status in
        0) [ -z "$pattern" ] || grep -Eq -- "$pattern" "$file" || verdict="FAILED: it did not print $pattern" ;;
        124 | 137) verdict="FAILED: no end in $patience s" ;;
        *) verdict="FAILED, status $status" ;;
    esac
    printf '%-64s %s (%d s)\n' "$name" "$verdict" "$took"
    [ "$verdict" = ok ] && return
    failed=$((failed + 1))
    tail -n 25 "$file" | sed 's/^/    /'
}

# A file for what a program prints.
log_of() {
    echo "$out/${1//[^A-Za-z0-9_.-]/_}.log"
}

# check NAME PATTERN COMMAND...
check() {
    local name=$1 pattern=$2 file since=$SECONDS status=0
    shift 2
    file=$(log_of "$name")
    "$@" >"$file" 2>&1 || status=$?
    report "$name" "$status" "$pattern" "$file" "$since"
}

# A port that nobody listens at.
free_port() {
    local port
    while port=$((20000 + RANDOM % 12000)) && listens "$port"; do :; done
    echo "$port"
}

listens() {
    local suffix
    printf -v suffix ':%04X' "$1"
    awk -v suffix="$suffix" '$4 == "0A" && $2 ~ suffix "$" { found = 1 } END { exit !found }' /proc/net/tcp{,6}
}

# pair LINK PATTERN PROGRAM ARGUMENT...: a server, and its client with the same arguments, both under the card.
# The client has to print the pattern. `client=(...)` are further arguments of the client, `ends` the status that it must end with (0).
pair() {
    local link=$1 pattern=$2 since=$SECONDS status=0 name file port server tries
    shift 2
    name="$*${client[*]:+ ${client[*]}} (${label:-}$link)"
    file=$(log_of "$name")
    port=$(free_port)
    card "$link" "$@" -p "$port" >"$file.server" 2>&1 &
    server=$!
    for ((tries = 0; tries < 600; tries++)); do
        ! listens "$port" && kill -0 $server 2>/dev/null || break
        sleep 0.05
    done
    card "$link" "$@" -p "$port" "${client[@]}" 127.0.0.1 >"$file" 2>&1 || status=$?
    ((status == 0)) || kill $server 2>/dev/null || true
    wait $server || ((status)) || { status=$? && cat "$file.server" >>"$file"; }
    ((status != ${ends:-0})) || status=0
    report "$name" "$status" "$pattern" "$file" "$since"
}

# Changes `link`. Where both would take long, programs take turns.
other_link() {
    if [ "$link" = eth ]; then link=ib; else link=eth; fi
}
