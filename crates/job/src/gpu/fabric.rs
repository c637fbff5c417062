//! The network between nodes, and NCCL's settings for it.
//!
//! By default NCCL uses the first interface that it finds, which may be a container's bridge. Set here, and why:
//!
//! | variable | when | source |
//! |---|---|---|
//! | `NCCL_SOCKET_IFNAME` | on several nodes: the interface with `--host`'s address, on which other nodes reach this one | NCCL's user guide, "Environment Variables"; `=` means exactly this name |
//! | `FI_PROVIDER=efa` | with EFA adapters and NCCL's plugin for them | AWS's guide to EFA with NCCL |
//! | `NCCL_NET_PLUGIN=ofi` | the same, if only `libnccl-net-ofi.so` exists: without it NCCL loads `libnccl-net.so` | NCCL's user guide, "Environment Variables" |
//!
//! A variable that the user has set is not changed. If NCCL's configuration file (`/etc/nccl.conf`) names an interface
//! too, the variable takes precedence. `FI_EFA_USE_DEVICE_RDMA` is not set: libfabric uses RDMA by default if the
//! adapters support it, and with the variable it ends the program if they do not (`fi_efa(7)`).

/// Network hardware and software of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fabric {
    /// Interface on which other nodes reach this one; `None` if they cannot.
    pub interface: Option<String>,
    /// Number of Elastic Fabric Adapters.
    pub efa_adapters: usize,
    /// NCCL's plugin for these adapters, aws-ofi-nccl, if it can be found.
    pub plugin: Option<EfaPlugin>,
}

/// Under which name the plugin is installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EfaPlugin {
    /// `libnccl-net.so`, which NCCL loads by itself.
    Default,
    /// `libnccl-net-ofi.so` only.
    Ofi,
}

impl Fabric {
    /// Variables to add to a rank's environment; those for which `is_set` is true are left out.
    #[must_use]
    pub fn environment(&self, is_set: impl Fn(&str) -> bool) -> Vec<(&'static str, String)> {
        let mut variables = Vec::new();
        if let Some(interface) = &self.interface {
            variables.push(("NCCL_SOCKET_IFNAME", format!("={interface}")));
        }
        if let Some(plugin) = self.plugin.filter(|_| self.efa_adapters > 0) {
            variables.push(("FI_PROVIDER", "efa".to_owned()));
            if plugin == EfaPlugin::Ofi {
                variables.push(("NCCL_NET_PLUGIN", "ofi".to_owned()));
            }
        }
        variables.retain(|(name, _)| !is_set(name));
        variables
    }

    /// A warning for the user if NCCL will be slow between nodes.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let is_idle = self.interface.is_some() && self.efa_adapters > 0 && self.plugin.is_none();
        is_idle.then(|| {
            format!(
                "this machine has {} EFA adapters, but NCCL's plugin for them was not found (libnccl-net.so or \
                 libnccl-net-ofi.so): without it NCCL uses TCP, which is several times slower; install aws-ofi-nccl, or \
                 add its folder to LD_LIBRARY_PATH (on Amazon's images: /opt/amazon/ofi-nccl/lib)",
                self.efa_adapters
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn p4d() -> Fabric {
        let plugin = Some(EfaPlugin::Default);
        Fabric { interface: Some("ens32".to_owned()), efa_adapters: 4, plugin }
    }

    #[test]
    fn variables_select_interface_and_provider() {
        let variables = p4d().environment(|_| false);
        let variables: Vec<_> =
            variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let all = [("NCCL_SOCKET_IFNAME", "=ens32"), ("FI_PROVIDER", "efa")];
        assert_eq!(variables, all);
        assert_eq!(Fabric::default().environment(|_| false), []);
        let named = Fabric { plugin: Some(EfaPlugin::Ofi), ..p4d() }.environment(|_| false);
        assert_eq!(named.last(), Some(&("NCCL_NET_PLUGIN", "ofi".to_owned())));
        let without_adapters = Fabric { efa_adapters: 0, plugin: Some(EfaPlugin::Ofi), ..p4d() };
        assert_eq!(without_adapters.environment(|_| false).len(), 1);
    }

    #[test]
    fn variables_of_the_user_are_not_changed() {
        let variables = p4d().environment(|name| name == "NCCL_SOCKET_IFNAME");
        assert_eq!(variables.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["FI_PROVIDER"]);
    }

    #[test]
    fn adapters_without_plugin_are_warned_about_if_other_nodes_can_reach_this_one() {
        let without_plugin = Fabric { plugin: None, ..p4d() };
        assert_eq!(without_plugin.environment(|_| false).len(), 1);
        assert!(
            without_plugin
                .warning()
                .is_some_and(|text| text.contains("4 EFA adapters") && text.contains("ofi-nccl"))
        );
        assert_eq!(p4d().warning(), None);
        assert_eq!(Fabric { interface: None, ..without_plugin }.warning(), None);
    }
}
