//! Which role each call needs.

use std::fmt;

/// What the holder of a token may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Look.
    Viewer,
    /// Look, and steer the job.
    Operator,
    /// Bring a node: what an agent does, and nothing that people do.
    Agent,
}

impl Role {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Viewer, Self::Operator, Self::Agent];

    /// Its name in a file of tokens.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Agent => "agent",
        }
    }

    /// Whether it may do what `needed` may.
    #[must_use]
    pub fn covers(self, needed: Self) -> bool {
        self == needed || (self == Self::Operator && needed == Self::Viewer)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a call needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Anybody may: a load balancer has no token.
    Nothing,
    /// A token of this role.
    Role(Role),
}

/// Whether a path is one of the web dashboard's and of metrics, and none of gRPC's, which name a package.
#[must_use]
pub fn is_web(path: &str) -> bool {
    let first = path.trim_start_matches('/').split('/').next().unwrap_or_default();
    matches!(first, "" | "assets" | "api" | "metrics" | "favicon.svg")
}

/// What a call needs, by its path: `/package.Service/Method` of gRPC, or one of the web dashboard. One that is not
/// listed needs the most.
#[must_use]
pub fn need_of(path: &str) -> Need {
    let (service, method) = path.trim_start_matches('/').split_once('/').unwrap_or((path, ""));
    match (service, method) {
        ("grpc.health.v1.Health", _) => Need::Nothing,
        ("grpc.reflection.v1.ServerReflection" | "grpc.reflection.v1alpha.ServerReflection", _) => {
            Need::Role(Role::Viewer)
        }
        (
            "baton.v1.JobService",
            "GetStatus" | "WatchEvents" | "ListCheckpoints" | "StreamMetrics" | "StreamLogs"
            | "GetRecipe",
        ) => Need::Role(Role::Viewer),
        ("baton.v1.NodeService", _) => Need::Role(Role::Agent),
        // The page itself holds no secrets, and asks for a token.
        ("/" | "/favicon.svg", "") | ("assets", _) => Need::Nothing,
        ("/metrics", "") => Need::Role(Role::Viewer),
        ("api", method) if !method.starts_with("control/") => Need::Role(Role::Viewer),
        _ => Need::Role(Role::Operator),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operator_may_look_and_an_agent_may_not() {
        let covered = Role::ALL.map(|role| Role::ALL.map(|needed| role.covers(needed)));
        assert_eq!(covered, [[true, false, false], [true, true, false], [false, false, true]]);
    }

    #[test]
    fn what_nobody_thought_of_needs_an_operator() {
        for path in ["/baton.v1.JobService/Stop", "/baton.v1.JobService/New", "/x.Y/Z", "/x", ""] {
            assert_eq!(need_of(path), Need::Role(Role::Operator), "{path}");
        }
        assert_eq!(need_of("/baton.v1.JobService/GetStatus"), Need::Role(Role::Viewer));
        assert_eq!(need_of("/baton.v1.NodeService/Attach"), Need::Role(Role::Agent));
        assert_eq!(need_of("/grpc.health.v1.Health/Check"), Need::Nothing);
    }

    #[test]
    fn the_page_is_open_what_it_shows_is_for_viewers_and_what_it_steers_for_operators() {
        for (path, need) in [
            ("/", Need::Nothing),
            ("/favicon.svg", Need::Nothing),
            ("/assets/app.js", Need::Nothing),
            ("/metrics", Need::Role(Role::Viewer)),
            ("/metrics/", Need::Role(Role::Operator)),
            ("/api/status", Need::Role(Role::Viewer)),
            ("/api/stream", Need::Role(Role::Viewer)),
            ("/api/whatever", Need::Role(Role::Viewer)),
            ("/api/control/stop", Need::Role(Role::Operator)),
            ("/api/control/whatever", Need::Role(Role::Operator)),
        ] {
            assert_eq!(need_of(path), need, "{path}");
            assert!(is_web(path), "{path}");
        }
        assert!(!is_web("/baton.v1.JobService/Stop"));
    }
}
