//! The role that each call needs.

use std::fmt;

/// Role of a token: the calls that it allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessRole {
    /// Read the status, events, metrics and logs.
    Viewer,
    /// Also control the job.
    Operator,
    /// Attach a node; allows only the calls of an agent.
    Agent,
}

impl AccessRole {
    /// All roles.
    pub const ALL: [Self; 3] = [Self::Viewer, Self::Operator, Self::Agent];

    /// Name in a tokens file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Agent => "agent",
        }
    }

    /// The name of someone with this role, followed by `'s`.
    #[must_use]
    pub fn possessive(self) -> &'static str {
        match self {
            Self::Viewer => "a viewer's",
            Self::Operator => "an operator's",
            Self::Agent => "an agent's",
        }
    }

    /// Whether this role allows the calls that need the role `needed`.
    #[must_use]
    pub fn covers(self, needed: Self) -> bool {
        self == needed || (self == Self::Operator && needed == Self::Viewer)
    }
}

impl fmt::Display for AccessRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The access that a call needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredAccess {
    /// No token: for the health checks of a load balancer, and for the dashboard's page, which asks for a token.
    Nothing,
    /// A token of this role.
    Role(AccessRole),
}

/// Whether a path belongs to the web dashboard or to metrics. gRPC paths begin with a package name.
#[must_use]
pub fn is_web(path: &str) -> bool {
    let first = path.trim_start_matches('/').split('/').next().unwrap_or_default();
    matches!(first, "" | "assets" | "api" | "metrics" | "favicon.svg")
}

/// The access that a call needs, by its path: `/package.Service/Method` of gRPC, or a path of the web dashboard. A path
/// that is not listed needs the role `operator`.
#[must_use]
pub fn required_access(path: &str) -> RequiredAccess {
    let (service, method) = path.trim_start_matches('/').split_once('/').unwrap_or((path, ""));
    match (service, method) {
        ("grpc.health.v1.Health", _) => RequiredAccess::Nothing,
        ("grpc.reflection.v1.ServerReflection" | "grpc.reflection.v1alpha.ServerReflection", _) => {
            RequiredAccess::Role(AccessRole::Viewer)
        }
        (
            "baton.v1.JobService",
            "GetStatus" | "WatchEvents" | "ListCheckpoints" | "StreamMetrics" | "StreamLogs"
            | "GetRecipe",
        ) => RequiredAccess::Role(AccessRole::Viewer),
        ("baton.v1.NodeService", _) => RequiredAccess::Role(AccessRole::Agent),
        // The page itself contains no secrets; it asks the user for a token.
        ("/" | "/favicon.svg", "") | ("assets", _) => RequiredAccess::Nothing,
        ("/metrics", "") => RequiredAccess::Role(AccessRole::Viewer),
        ("api", method) if !method.starts_with("control/") => {
            RequiredAccess::Role(AccessRole::Viewer)
        }
        _ => RequiredAccess::Role(AccessRole::Operator),
    }
}

/// Name of a call for people, by its path: the last part in words, such as `trigger checkpoint`.
#[must_use]
pub fn call_name(path: &str) -> String {
    let last = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let mut name = String::new();
    for letter in last.chars() {
        if letter.is_ascii_uppercase() && !name.is_empty() {
            name.push(' ');
        }
        name.push(letter.to_ascii_lowercase());
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operator_has_the_access_of_a_viewer_and_an_agent_has_not() {
        let covered = AccessRole::ALL.map(|role| AccessRole::ALL.map(|needed| role.covers(needed)));
        assert_eq!(covered, [[true, false, false], [true, true, false], [false, false, true]]);
    }

    #[test]
    fn a_call_is_named_in_words() {
        for (path, name) in [
            ("/baton.v1.JobService/Pause", "pause"),
            ("/baton.v1.JobService/TriggerCheckpoint", "trigger checkpoint"),
            ("/api/control/pause", "pause"),
            ("/metrics", "metrics"),
        ] {
            assert_eq!(call_name(path), name);
        }
    }

    #[test]
    fn an_unknown_path_needs_an_operator() {
        for path in ["/baton.v1.JobService/Stop", "/baton.v1.JobService/New", "/x.Y/Z", "/x", ""] {
            assert_eq!(required_access(path), RequiredAccess::Role(AccessRole::Operator), "{path}");
        }
        assert_eq!(
            required_access("/baton.v1.JobService/GetStatus"),
            RequiredAccess::Role(AccessRole::Viewer)
        );
        assert_eq!(
            required_access("/baton.v1.NodeService/Attach"),
            RequiredAccess::Role(AccessRole::Agent)
        );
        assert_eq!(required_access("/grpc.health.v1.Health/Check"), RequiredAccess::Nothing);
    }

    #[test]
    fn the_page_is_public_its_data_is_for_viewers_and_control_is_for_operators() {
        for (path, need) in [
            ("/", RequiredAccess::Nothing),
            ("/favicon.svg", RequiredAccess::Nothing),
            ("/assets/app.js", RequiredAccess::Nothing),
            ("/metrics", RequiredAccess::Role(AccessRole::Viewer)),
            ("/metrics/", RequiredAccess::Role(AccessRole::Operator)),
            ("/api/status", RequiredAccess::Role(AccessRole::Viewer)),
            ("/api/stream", RequiredAccess::Role(AccessRole::Viewer)),
            ("/api/whatever", RequiredAccess::Role(AccessRole::Viewer)),
            ("/api/control/stop", RequiredAccess::Role(AccessRole::Operator)),
            ("/api/control/whatever", RequiredAccess::Role(AccessRole::Operator)),
        ] {
            assert_eq!(required_access(path), need, "{path}");
            assert!(is_web(path), "{path}");
        }
        assert!(!is_web("/baton.v1.JobService/Stop"));
    }
}
