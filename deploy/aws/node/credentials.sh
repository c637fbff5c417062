# shellcheck shell=bash disable=SC2153
# Certificates and tokens of a job on several nodes. The coordinator creates them; Parameter Store keeps, encrypted,
# those for agents and for users. They are in no template, no user data and no log.

readonly CERTS=/etc/baton/certs

exchange_credentials() {
    if [ "$ROLE" = coordinator ]; then leave_credentials; else take_credentials; fi
    chown -R baton:baton "$CERTS"
}

# Created again if the address has changed, as a certificate is for an address.
leave_credentials() {
    local address
    address=$(metadata meta-data/local-ipv4)
    if [ "$(cat "$CERTS/address" 2>/dev/null)" != "$address" ]; then
        rm -rf "$CERTS"
        "$HOME_OF_BATON/bin/baton" cert --out "$CERTS" --days 365 --host "$address"
        # No further certificates are needed: this one is valid until the coordinator's address changes.
        rm "$CERTS/ca-key.pem"
        chmod 700 "$CERTS"
        echo "$address" >"$CERTS/address"
    fi
    leave agent/ca "$CERTS/ca.pem"
    leave agent/token "$CERTS/agent.token"
    leave operator/ca "$CERTS/ca.pem"
    leave operator/token "$CERTS/operator.token"
}

# leave NAME FILE: stores a file's text. From a file, as arguments are visible to everybody on a machine.
leave() { retry 300 leave_once "$@" || fail "certificates and tokens cannot be written to Parameter Store"; }

leave_once() {
    aws ssm put-parameter --name "/baton/$JOB/$1" --type SecureString --overwrite --value "file://$2" >/dev/null
}

take_credentials() {
    mkdir -p "$CERTS"
    chmod 700 "$CERTS"
    retry 900 take agent/ca "$CERTS/ca.pem" || fail "the coordinator has stored no certificate within 15 minutes: see its log"
    retry 60 take agent/token "$CERTS/agent.token" || fail "the coordinator has stored no token: see its log"
}

take() {
    local text
    text=$(aws ssm get-parameter --name "/baton/$JOB/$1" --with-decryption --output text --query Parameter.Value 2>/dev/null) || return
    (umask 077 && printf '%s\n' "$text" >"$2")
}
