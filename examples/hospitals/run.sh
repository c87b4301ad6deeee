#!/usr/bin/env bash
# The steps of docs/deploy.md on one machine, over loopback:
#
#     bash examples/hospitals/run.sh [FOLDER]
#
# needs `potluck` and Flower's programs on the PATH (pip install 'potluck[flower]'). It works in FOLDER, which must
# not exist (default: a temporary one), and ends what it has started, by process id, however it ends.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=${1:-$(mktemp -d)/hospitals}
sites=(north east west)
for program in potluck python flwr flower-superlink flower-supernode; do
    command -v "$program" > /dev/null || { echo "there is no $program on the PATH" >&2; exit 2; }
done
[ ! -e "$work" ] || { echo "$work exists" >&2; exit 2; }
mkdir -p "$work" && cd "$work"
for file in experiment.yaml make_data.py; do cp "$here/$file" .; done
for site in "${sites[@]}"; do mkdir "$site" && cp "$here/$site/site.py" "$site/"; done
read -r inside outside < <(python -c '
import socket
doors = [socket.socket(), socket.socket()]
for door in doors: door.bind(("127.0.0.1", 0))
print(*(door.getsockname()[1] for door in doors))')

pids=()
finish() {
    local i
    for ((i = ${#pids[@]} - 1; i >= 0; i--)); do
        kill "${pids[i]}" 2> /dev/null || continue
        wait "${pids[i]}" 2> /dev/null || true
    done
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
start() {  # a name for the log, then a command, which runs on
    local name=$1
    shift
    "$@" > "$name.log" 2>&1 &
    pids+=($!)
}
until_open() {  # a port
    for _ in $(seq 300); do
        (exec 3<> "/dev/tcp/127.0.0.1/$1") 2> /dev/null && return
        sleep 0.2
    done
    echo "nobody listens on port $1; see the logs in $work" >&2
    exit 1
}
say() { printf '\n--- %s\n' "$*"; }

say "every hospital has data of its own"
python make_data.py

say "keys"
potluck keys keys --server 127.0.0.1,localhost --clients north,east,west

say "the server: SuperLink on loopback, gate before it, public keys registered"
keys=$work/keys
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_HOME=$work/operator
export no_proxy=localhost,127.0.0.1 NO_PROXY=localhost,127.0.0.1  # all calls stay on this machine
mkdir operator
cat > operator/config.toml << TOML
[superlink.inside]
address = "127.0.0.1:$inside"
root-certificates = "$keys/ca.crt"

[superlink.outside]
address = "127.0.0.1:$outside"
root-certificates = "$keys/ca.crt"
TOML
start superlink flower-superlink --host 127.0.0.1 --port "$inside" --database superlink.db \
    --ssl-ca-certfile "$keys/ca.crt" --ssl-certfile "$keys/server.crt" --ssl-keyfile "$keys/server.key" \
    --enable-supernode-auth --disable-runtime-dependency-installation
start gate potluck gate --listen "127.0.0.1:$outside" --superlink "127.0.0.1:$inside" \
    --ca "$keys/ca.crt" --certificate "$keys/server.crt" --key "$keys/server.key"
until_open "$inside"
until_open "$outside"
for site in "${sites[@]}"; do
    flwr supernode register "$keys/clients/$site.pub" inside | tail -n 1
done
if flwr supernode list outside > refused.log 2>&1; then
    echo "the gate has let a control request through" >&2
    exit 1
fi
echo "the same request from outside is refused by the gate: $(grep -o '404 Not Found' refused.log | head -n 1)"

say "every hospital reads what would leave it, and pins that"
for site in "${sites[@]}"; do
    potluck join --client "$site" --model "$site/site.py:build" --data "$site/site.py:load" \
        --check experiment.yaml --write "$site/contract.json"
done

say "the hospitals join, the server serves"
for site in "${sites[@]}"; do
    start "$site" potluck join --server "127.0.0.1:$outside" --client "$site" \
        --model "$site/site.py:build" --data "$site/site.py:load" --accept "$site/contract.json" \
        --home "homes/$site" --ca "$keys/ca.crt" --node-key "$keys/clients/$site"
done
secure=(--ca "$keys/ca.crt" --certificate "$keys/server.crt" --key "$keys/server.key" --node-keys \
    --client-keys "$keys/clients")
potluck serve experiment.yaml --address "127.0.0.1:$inside" --out runs/hospitals "${secure[@]}"

say "a server that asks for more than was pinned is refused"
if potluck serve experiment.yaml method.tie_headers=true engine.patience=20 --address "127.0.0.1:$inside" \
    --out runs/more "${secure[@]}" 2> more.log; then
    echo "the hospitals have taken part in what they had not agreed to" >&2
    exit 1
fi
grep -m 1 -o "client north: option .* this site agreed to .*" more.log

say "done; everything is in $work"
