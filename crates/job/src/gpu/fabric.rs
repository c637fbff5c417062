//! The network between nodes, and what NCCL is told about it.
//!
//! NCCL chooses by itself what it finds first, which may be a container's bridge. What is set here, and why:
//!
//! | variable | where | source |
//! |---|---|---|
//! | `NCCL_SOCKET_IFNAME` | several nodes: the interface with `--host`'s address, by which the others reach this one | NCCL's user guide, "Environment Variables"; `=` means this very name |
//! | `FI_PROVIDER=efa` | EFA adapters and NCCL's plugin for them | AWS's guide to EFA with NCCL |
//!
//! What the user's environment has stays; where NCCL's own file (`/etc/nccl.conf`) names an interface too, what is set
//! here counts. `FI_EFA_USE_DEVICE_RDMA` is not set: by itself libfabric takes RDMA where adapters have it, and with the
//! variable it ends programs where they have not (`fi_efa(7)`).

/// What a node has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fabric {
    /// The interface by which other nodes reach this one; none where there are no others.
    pub interface: Option<String>,
    /// Number of Elastic Fabric Adapters.
    pub efa_adapters: usize,
    /// Whether NCCL's plugin for them, aws-ofi-nccl, is where NCCL looks for it.
    pub has_plugin: bool,
}

impl Fabric {
    /// What a rank's environment gets, beside what is set there.
    #[must_use]
    pub fn environment(&self, is_set: impl Fn(&str) -> bool) -> Vec<(&'static str, String)> {
        let mut variables = Vec::new();
        if let Some(interface) = &self.interface {
            variables.push(("NCCL_SOCKET_IFNAME", format!("={interface}")));
        }
        if self.efa_adapters > 0 && self.has_plugin {
            variables.push(("FI_PROVIDER", "efa".to_owned()));
        }
        variables.retain(|(name, _)| !is_set(name));
        variables
    }

    /// What a person should know before a job on several nodes is slow.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let is_idle = self.interface.is_some() && self.efa_adapters > 0 && !self.has_plugin;
        is_idle.then(|| {
            format!(
                "this machine has {} EFA adapters, but no plugin of NCCL's for them was found (libnccl-net.so or \
                 libnccl-net-ofi.so): without one NCCL takes TCP, which is several times slower; install aws-ofi-nccl, or \
                 put its folder on LD_LIBRARY_PATH (on Amazon's images: /opt/amazon/ofi-nccl/lib)",
                self.efa_adapters
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn p4d() -> Fabric {
        Fabric { interface: Some("ens32".to_owned()), efa_adapters: 4, has_plugin: true }
    }

    #[test]
    fn nccl_is_told_which_network_leads_to_the_other_nodes() {
        let told = p4d().environment(|_| false);
        let told: Vec<_> = told.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let all = [("NCCL_SOCKET_IFNAME", "=ens32"), ("FI_PROVIDER", "efa")];
        assert_eq!(told, all);
        assert_eq!(Fabric::default().environment(|_| false), []);
    }

    #[test]
    fn what_the_user_has_set_stays() {
        let told = p4d().environment(|name| name == "NCCL_SOCKET_IFNAME");
        assert_eq!(told.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["FI_PROVIDER"]);
    }

    #[test]
    fn adapters_that_nccl_cannot_use_are_told_of_where_there_are_other_nodes() {
        let lacks = Fabric { has_plugin: false, ..p4d() };
        assert_eq!(lacks.environment(|_| false).len(), 1);
        assert!(
            lacks
                .warning()
                .is_some_and(|text| text.contains("4 EFA adapters") && text.contains("ofi-nccl"))
        );
        assert_eq!(p4d().warning(), None);
        assert_eq!(Fabric { interface: None, ..lacks }.warning(), None);
    }
}
