#!/usr/bin/env bash
# Checks deploy/container/ without a Docker engine: lints the Dockerfile, builds its last stages with buildah from
# existing programs, checks the image, and trains in it as the image's user.
#
#   scripts/deploy/container.sh [FOLDER]    folder of the three programs (default: target/debug)
#   scripts/deploy/container.sh --base      only creates the base image, if it is missing
#
# Needs root, and on Debian: apt-get install -y --no-install-recommends buildah debootstrap iproute2
# A base image is bootstrapped from Debian's archive, once (a minute); BASE_TREE names an existing tree of debootstrap.
# HADOLINT names the linter (default: .venv-deploy/bin/hadolint). KEEP=1 leaves the images in target/deploy-check.
#
# Not checked: the stages that compile, the real base images, and NVIDIA's libraries.
# Nothing depends on how fast this machine is: the job has no end until it is drained.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly ME=$PWD/scripts/deploy/container.sh
readonly FOLDER=deploy/container
readonly BIN=${1:-target/debug}
# The release of the Dockerfile's base.
readonly SUITE=bookworm
readonly USER_ID=65532
# Maximum size of the image for the CPU; most of it is libtorch.
readonly MAX_MB=800
# Limit for each wait, seconds; reached only when something is broken.
readonly TIMEOUT_SECONDS=600

say() { printf 'container: %s\n' "$*"; }
fail() {
    printf 'container: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '           %s\n' "$line" >&2; done
    exit "${code:-1}"
}
# Exits with the code that scripts/deploy/check.sh treats as a skipped check.
cannot_run() { code=77 fail "$@"; }

main() {
    [ "$BIN" = --base ] || need_tools
    work="$(mkdir -p target/deploy-check && cd target/deploy-check && pwd)"
    trap leave EXIT
    driver=overlay
    buildah --root "$work/root" --runroot "$work/run" --storage-driver overlay info >/dev/null 2>&1 || driver=vfs
    make_base
    [ "$BIN" != --base ] || return 0

    "$HADOLINT" "$FOLDER/Dockerfile"
    say "hadolint reports no problems"
    check_context
    prepare_contexts
    build cpu --build-context libraries-cpu="$work/libraries-cpu"
    # Without the gigabytes of libraries: only checks that the other target builds, and its settings.
    build cuda --build-context libraries-cuda="$work/libraries-none"
    check_config cpu
    check_config cuda NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
    check_files
    check_runs
    say "all checks passed"
}

need_tools() {
    local missing=() tool
    HADOLINT=${HADOLINT:-.venv-deploy/bin/hadolint}
    for tool in buildah debootstrap ip unshare nsenter python3; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    [ ${#missing[@]} -eq 0 ] || cannot_run "missing here: ${missing[*]}" \
        "run: apt-get install -y --no-install-recommends buildah debootstrap iproute2 util-linux python3"
    [ -x "$HADOLINT" ] || fail "no linter at $HADOLINT" \
        "run: python3 -m venv .venv-deploy && .venv-deploy/bin/pip install -r scripts/deploy/requirements.txt"
    [ "$(id -u)" -eq 0 ] || cannot_run "building an image without an engine needs root"
    for tool in baton baton-coordinator baton-worker; do
        [ -x "$BIN/$tool" ] || fail "no $tool in $BIN" "run: make build, or give the folder of the programs"
    done
    # The checkout in which the programs were built, as they are linked to its libtorch.
    built="$(cd "$BIN/../.." && pwd)"
    [ -e "$built/.libtorch" ] || fail "no .libtorch in $built, where the programs were built" "run: make setup"
}

leave() {
    local result=$?
    [ -z "${KEEP:-}" ] || return "$result"
    # The base is kept: it takes longest to create.
    bd rm --all >/dev/null 2>&1 || true
    bd rmi --force baton:cpu baton:cuda baton:context >/dev/null 2>&1 || true
    bd rmi --prune >/dev/null 2>&1 || true
    rm -rf "$work"/{programs,libraries-*,context*,space,environment}
    return "$result"
}

bd() { buildah --root "$work/root" --runroot "$work/run" --storage-driver "$driver" "$@"; }

# quietly COMMAND...: shows the output only if the command fails.
quietly() {
    local output
    output="$("$@" 2>&1)" || fail "$* failed:" "$output"
}

# --- the build context -------------------------------------------------------------------------

# It must contain all files that rustc read for the programs, and nothing but sources.
check_context() {
    printf 'FROM scratch\nCOPY . /\n' >"$work/context.Dockerfile"
    quietly bd build --isolation chroot --ignorefile "$FOLDER/Dockerfile.dockerignore" \
        --file "$work/context.Dockerfile" --tag baton:context .
    local container folder file read=0 absent=() kib
    container="$(bd from baton:context)"
    folder="$(bd mount "$container")"

    # cargo's lists of sources. A file that does not exist here belongs to another checkout, in which the programs were
    # built. Of .git only the revision is read, and the build goes on without it.
    while read -r file; do
        [ -e "$file" ] || continue
        read=$((read + 1))
        [ -e "$folder/$file" ] || absent+=("$file")
    done < <(sed 's/^[^:]*://' "$BIN"/{baton,baton-coordinator,baton-worker}.d | tr ' ' '\n' |
        sed -n "s|^$built/||p" | grep -vE '^(target|\.git)/' | sort -u)
    [ "$read" -gt 100 ] || fail "cargo's lists in $BIN (*.d) name only $read sources"
    for file in Makefile Cargo.lock .cargo/config.toml scripts/setup.sh scripts/dist/{about.hbs,about.toml,notices.sh} LICENSE; do
        [ -e "$folder/$file" ] || absent+=("$file")
    done
    [ ${#absent[@]} -eq 0 ] || fail "$FOLDER/Dockerfile.dockerignore excludes files that the build reads:" "${absent[@]}"

    local extra
    extra="$(cd "$folder" && find . \( -name .git -o -name target -o -name '.libtorch*' -o -name '.venv*' -o -name runs \
        -o -name '*.pem' -o -name '*.key' -o -name '*.token' -o -name tokens -o -name '.env' \) -print)"
    # Certificates of tests would be harmless, but there are none today.
    [ -z "$extra" ] || fail "the build context has files that are not sources:" "$extra"
    kib="$(du -sk "$folder" | cut -f1)"
    [ "$kib" -lt 50000 ] || fail "the build context is $((kib / 1000)) MB; more than 50 MB cannot be sources"
    bd rm "$container" >/dev/null
    say "the context has the $read source files of the programs; $((kib / 1000)) MB"
}

# --- the image ---------------------------------------------------------------------------------

make_base() {
    if bd inspect --type image baton-base >/dev/null 2>&1; then return; fi
    local tree=${BASE_TREE:-} container folder
    if [ -z "$tree" ]; then
        tree=$work/tree
        rm -rf "$tree"
        say "bootstrapping Debian $SUITE (once, a minute)"
        quietly debootstrap --variant=minbase "$SUITE" "$tree"
    fi
    container="$(bd from scratch)"
    folder="$(bd mount "$container")"
    # As small as the image that it replaces.
    (cd "$tree" && tar --create --one-file-system --exclude=./{proc,sys,dev,run,tmp}/'*' --exclude=./var/cache/apt/'*' \
        --exclude=./var/lib/apt/lists/'*' --exclude=./usr/share/{doc,man,locale,info}/'*' --exclude=./var/log/'*' .) |
        tar --extract --same-permissions --directory "$folder"
    quietly bd commit --rm "$container" baton-base
    rm -rf "$work/tree"
}

# Creates the folders that the stages `programs` and `libraries-cpu` would create.
prepare_contexts() {
    rm -rf "$work"/{programs,libraries-*}
    "$FOLDER/assemble.sh" programs "$BIN" "$work/programs/out"
    quietly scripts/dist/notices.sh "$work/programs/out/opt/baton/NOTICES"
    "$FOLDER/assemble.sh" cpu "$built/.libtorch" "$work/libraries-cpu/out"
    mkdir -p "$work/libraries-none/out"
    if "$FOLDER/assemble.sh" cuda "$work/libraries-none" "$work/libraries-none/out" 2>/dev/null; then
        fail "assemble.sh accepts an empty folder of CUDA's libraries"
    fi
}

# build TARGET OPTION...
build() {
    local target=$1
    shift
    # OCI's format does not support HEALTHCHECK. Stages that are replaced by a folder are not run.
    quietly bd build --layers --format docker --isolation chroot --target "$target" --build-arg BASE=baton-base \
        --build-arg VERSION=checked --build-context programs="$work/programs" "$@" \
        --file "$FOLDER/Dockerfile" --tag "baton:$target" .
    say "target $target builds"
}

# check_config TARGET NAME=VALUE...
check_config() {
    local target=$1
    shift
    bd inspect --type image "baton:$target" | python3 -c '
import json, sys

target, *variables = sys.argv[1:]
config = json.load(sys.stdin)["Docker"]["config"]
health = config.get("Healthcheck", {})
labels = config.get("Labels") or {}
environment = config["Env"]
found = {
    "user": (config["User"], "65532:65532"),
    "working folder": (config["WorkingDir"], "/var/lib/baton"),
    "signal": (config["StopSignal"], "SIGTERM"),
    "command": (config["Cmd"], ["baton", "--help"]),
    "entry point": (config.get("Entrypoint") or [], []),
    "port": (list(config["ExposedPorts"]), ["29600/tcp"]),
    "health check": (health.get("Test"), ["CMD", "baton-health"]),
    "licence": (labels.get("org.opencontainers.image.licenses"), "Apache-2.0"),
    "version": (labels.get("org.opencontainers.image.version"), "checked"),
    "missing variables": ([v for v in variables if v not in environment], []),
}
wrong = [f"{name} is {is_!r} instead of {want!r}" for name, (is_, want) in found.items() if is_ != want]
sys.exit(f"container: target {target}: " + "; ".join(wrong) if wrong else 0)
' "$target" "$@"
    say "target $target: user, signal, health check, command and labels are correct"
}

# Checks the files that our stages added to the base, and their permissions.
check_files() {
    local base image container
    container="$(bd from baton-base)" && base="$(bd mount "$container")"
    container="$(bd from baton:cpu)" && image="$(bd mount "$container")"
    # Without mount points and files of buildah.
    list() { (cd "$1" && find . -xdev \( -path ./proc -o -path ./sys -o -path ./dev -o -path ./run \) -prune -o -print | sort); }
    local added
    added="$(comm -13 <(list "$base") <(list "$image"))"

    local allowed='^\./(opt/baton(/(LICENSE|NOTICES|bin(/baton(-coordinator|-worker|-health)?)?|recipes(/base)?(/[a-z0-9_]+\.toml)?'
    allowed+='|assets(/digits(/(README\.md|digits-(train|val)\.beton))?)?'
    allowed+='|libtorch(/[^/]+(\.dist-info(/licenses(/[A-Za-z.]+)?)?)?|/torch/lib(/lib[a-z0-9_]+\.so(\.[0-9]+)?)?'
    allowed+='|/nvidia/cu13(/lib(/lib[a-z]+\.so\.13)?)?)?))?|var/lib/baton|etc/ssl(/certs(/ca-certificates\.crt)?)?'
    # Files of useradd, and buildah's file of host names.
    allowed+='|etc/(passwd|group|shadow|gshadow|subuid|subgid)-?|etc/\.pwd\.lock|var/log/(lastlog|faillog)|etc/hosts)$'
    local strange
    strange="$(grep -Ev "$allowed" <<<"$added" || true)"
    [ -z "$strange" ] || fail "the image has unexpected files:" "$strange"
    local expected
    for expected in ./opt/baton/bin/baton{,-coordinator,-worker,-health} ./opt/baton/{LICENSE,NOTICES} ./var/lib/baton \
        ./opt/baton/libtorch/torch/lib/libtorch_cpu.so ./opt/baton/recipes/digits_cpu.toml ./etc/ssl/certs/ca-certificates.crt; do
        grep -qxF "$expected" <<<"$added" || fail "the image lacks $expected"
    done

    local bad program kib
    bad="$(find "$image" -xdev -perm /6000 -type f)"
    [ -z "$bad" ] || fail "setuid programs are left:" "$bad"
    bad="$(find "$image/opt" "$image/etc" -xdev \( ! -uid 0 -o -perm /022 ! -type l \))"
    [ -z "$bad" ] || fail "files that are not owned by root, or that others may write:" "$bad"
    bad="$(find "$image" -xdev \( -path "$image/proc" -o -path "$image/sys" -o -path "$image/dev" -o -path "$image/run" \) -prune \
        -o \( -perm -0002 -o -uid $USER_ID -o -gid $USER_ID \) ! -type l -printf '/%P\n' |
        grep -vxE '/(tmp|var/tmp|var/lib/baton)' || true)"
    [ -z "$bad" ] || fail "the user may write in the image:" "$bad"
    [ "$(stat -c '%u:%g %a' "$image/var/lib/baton")" = "$USER_ID:$USER_ID 750" ] ||
        fail "/var/lib/baton does not belong to the user"
    for program in baton baton-coordinator baton-worker; do
        ! readelf --section-headers "$image/opt/baton/bin/$program" | grep -q '\.symtab' || fail "$program is not stripped"
    done
    ! grep -rlE -- '-----BEGIN [A-Z ]*PRIVATE KEY' "$image"/opt/baton/{bin/baton-health,recipes,assets} ||
        fail "there is a private key in the image"
    kib="$(du -sk "$image" | cut -f1)"
    [ "$kib" -lt $((MAX_MB * 1000)) ] || fail "the image is $((kib / 1000)) MB; $MAX_MB are allowed"
    say "$(wc -l <<<"$added") paths were added, all expected, none writable by others; $((kib / 1000)) MB in total"
}

# --- running it --------------------------------------------------------------------------------

# In separate network and process namespaces, which end with this script.
check_runs() {
    local container image
    container="$(bd from baton:cpu)"
    image="$(bd mount "$container")"
    bd inspect --type image baton:cpu |
        python3 -c 'import json, sys; print("\n".join(json.load(sys.stdin)["Docker"]["config"]["Env"]))' >"$work/environment"
    rm -rf "$work/space"
    mkdir -p "$work/space/volume"
    echo '127.0.0.1 localhost' >"$work/space/hosts"
    "$BIN/baton" cert --out "$work/space/secrets" >/dev/null
    chown -R "$USER_ID:$USER_ID" "$work/space"
    unshare --mount --net --pid --fork --kill-child --mount-proc "$ME" --inside "$image" "$work/space" "$work/environment"
}

# start NAME [VARIABLE=VALUE]... PROGRAM ARGUMENT...: like an engine, with only a volume writable, and as process 1. Its
# output goes to $space/NAME.log, its exit code to $space/NAME.code.
start() {
    local name=$1
    shift
    rm -f "$space/$name".{code,pid}
    (
        result=0
        unshare --mount --pid --fork --kill-child "$ME" --container "$image" "$space" "$environment" "$name" "$@" \
            >>"$space/$name.log" 2>&1 || result=$?
        echo "$result" >"$space/$name.code"
    ) &
}

pid_of() { cat "$space/$1.pid"; }

# run_in NAME [VARIABLE=VALUE]... COMMAND...: runs a command in a running container, like an engine's exec and health
# check.
run_in() {
    local name=$1
    shift
    nsenter --target "$(pid_of "$name")" --mount --pid chroot "$image" "${enter[@]}" "$@"
}

# until_ok COMMAND...: waits until the command succeeds.
until_ok() {
    local end=$((SECONDS + TIMEOUT_SECONDS))
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.2
    done
}

has_failed() { ! "$@"; }

# code_of NAME: waits for its end.
code_of() {
    until_ok test -e "$space/$1.code" || fail "$1 did not end; its log:" "$(tail -n 20 "$space/$1.log")"
    cat "$space/$1.code"
}

enter_as_user() {
    mapfile -t variables <"$environment"
    # Without capabilities and without a way to get them, as in a restricted cluster.
    enter=(/usr/bin/env -i --chdir=/var/lib/baton "${variables[@]}" HOME=/var/lib/baton /usr/bin/setpriv
        --reuid="$USER_ID" --regid="$USER_ID" --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all
        /usr/bin/env)
}

# Runs inside one container.
container() {
    image=$1 space=$2 environment=$3
    # The process id outside, as this /proc still belongs to the outer namespace.
    local pid
    read -r pid _ </proc/self/stat
    echo "$pid" >"$space/$4.pid"
    shift 4
    mount --bind "$image" "$image"
    mount -o remount,bind,ro "$image"
    # Engines mount this file too.
    mount --bind "$space/hosts" "$image/etc/hosts"
    mount -t proc proc "$image/proc"
    mount -t tmpfs -o mode=755 dev "$image/dev"
    local device
    for device in null zero full random urandom; do
        touch "$image/dev/$device"
        mount --bind "/dev/$device" "$image/dev/$device"
    done
    mkdir -m 1777 "$image/dev/shm"
    mount -t tmpfs -o mode=1777 tmp "$image/tmp"
    mount --bind "$space/volume" "$image/var/lib/baton"
    mount -t tmpfs -o mode=755 run "$image/run"
    mkdir "$image/run/secrets"
    mount --bind -o ro "$space/secrets" "$image/run/secrets"
    enter_as_user
    # Process 1 from here on.
    exec chroot "$image" "${enter[@]}" "$@"
}

inside() {
    image=$1 space=$2 environment=$3
    ip link set lo up
    enter_as_user
    local tls=(BATON_TLS_CA=/run/secrets/ca.pem)
    local looks=("${tls[@]}" BATON_TOKEN_FILE=/run/secrets/viewer.token)
    local agent=("${tls[@]}" BATON_COORDINATOR=https://localhost:29600)

    # Checks the output of `docker run` without a command, and its user.
    start idle sleep infinity
    # The container is complete once this succeeds in it.
    until_ok run_in idle true || fail "no container starts; its log:" "$(cat "$space/idle.log")"
    run_in idle baton --help | grep -q 'Trains on machines' || fail "baton --help does not print its help"
    local program
    for program in baton baton-coordinator baton-worker; do
        run_in idle "$program" --version >/dev/null || fail "$program does not start"
    done
    run_in idle sh -c 'id -u; grep -E "^(CapEff|NoNewPrivs)" /proc/self/status' | tr -s '\n\t' ' ' |
        grep -q "^$USER_ID CapEff: 0000000000000000 NoNewPrivs: 1" || fail "the container does not run as user $USER_ID without capabilities"
    local libraries
    # shellcheck disable=SC2016 # the image's shell
    libraries="$(run_in idle sh -c 'ldd "$(command -v baton-worker)"')"
    ! grep 'not found' <<<"$libraries" || fail "a library of baton-worker is not in the image"
    grep -q 'libtorch_cpu.so => /opt/baton/libtorch/' <<<"$libraries" || fail "libtorch is not in the image:" "$libraries"
    ! run_in idle baton-health 2>/dev/null || fail "the health check passes without a running program"
    kill -KILL "$(pid_of idle)"
    say "programs start as user $USER_ID, without capabilities and on a read-only root, and find libtorch"

    # An agent without a coordinator is unhealthy; with one, also after a restart of the coordinator, it is healthy.
    start agent "${agent[@]}" BATON_TOKEN_FILE=/run/secrets/agent.token baton-worker agent --run-dir agent --ranks 1
    until_ok grep -q 'looking for the coordinator' "$space/agent.log" || fail "no agent starts; its log:" "$(cat "$space/agent.log")"
    ! run_in agent "${agent[@]}" baton-health 2>/dev/null || fail "an agent without a coordinator is reported as healthy"
    start_coordinator
    until_ok run_in coordinator "${looks[@]}" baton-health ||
        fail "the coordinator does not get healthy; its log:" "$(cat "$space/coordinator.log")"
    until_ok run_in agent "${agent[@]}" baton-health || fail "the agent does not get healthy:" "$(cat "$space/agent.log")"
    until_ok has_logged '1 rank trains phase=Training' 1 ||
        fail "no rank trains:" "$(cat "$space/agent.log" "$space/coordinator.log")"
    # As process 1 it has no default for a signal.
    kill -TERM "$(pid_of coordinator)"
    code_of coordinator >/dev/null
    until_ok has_failed run_in agent "${agent[@]}" baton-health || fail "an agent whose coordinator has ended is reported as healthy"
    start_coordinator
    until_ok run_in agent "${agent[@]}" baton-health || fail "the agent does not get healthy again:" "$(cat "$space/agent.log")"
    until_ok has_logged '1 rank trains.* phase=Training' 2 ||
        fail "training does not continue:" "$(cat "$space/agent.log" "$space/coordinator.log")"
    run_in coordinator "${tls[@]}" BATON_TOKEN_FILE=/run/secrets/operator.token baton drain >/dev/null || fail "the job cannot be drained"
    local name code
    for name in agent coordinator; do
        code="$(code_of "$name")"
        [ "$code" = 75 ] || fail "the $name ended with $code instead of 75, drained:" "$(tail -n 20 "$space/$name.log")"
    done
    find "$space/volume/runs/job/checkpoints" -name manifest.json | grep -q . || fail "no checkpoint was saved"
    say "digits: coordinator and agent over TLS, each in its own container, with a restart of the coordinator, until a drain"
}

# has_logged PATTERN TIMES: whether the coordinators have, together, logged it that often.
has_logged() { [ "$(grep -cE "$1" "$space/coordinator.log")" -ge "$2" ]; }

start_coordinator() {
    local digits=/opt/baton/assets/digits/digits
    start coordinator baton-coordinator serve --run-dir runs/job --recipe /opt/baton/recipes/digits_cpu.toml \
        --listen 0.0.0.0:29600 --tls-cert /run/secrets/coordinator.pem --tls-key /run/secrets/coordinator-key.pem \
        --tokens /run/secrets/tokens --set data.train=$digits-val.beton --set data.val=$digits-val.beton \
        --set model.arch=resnet18 --set train.epochs=1000000 --set checkpoint.every_epochs=1000 \
        --set evaluation.every_epochs=1000
}

case ${1:-} in
--inside) shift && inside "$@" ;;
--container) shift && container "$@" ;;
-h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" ;;
*) main ;;
esac
