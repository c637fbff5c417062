//! Prices of machines. Prices change: this is the only place to update them, and `--price` overrides them.
//!
//! Amazon EC2 in us-east-1, Linux, dollars per hour for the whole instance. On-demand prices are from AWS's price
//! list. Spot prices are medians over the availability zones at one time; those of p4d.24xlarge ranged from $2.47
//! to $8.19. Both are from the catalogue that the SkyPilot project makes with AWS's price API
//! (`catalogs/v8/aws/vms.csv` of `skypilot-org/skypilot-catalog`, commit 00148f2af367), which also lists vCPUs and
//! GPU memory. The date of that commit is unknown, because the copy used has no dates. Zones without a spot price
//! are left out.

/// Date on which the prices were looked up.
pub const LOOKED_UP: &str = "2026-11-22";
/// Source of the prices.
pub const SOURCE: &str = "AWS price list, us-east-1, from SkyPilot's catalogue (commit 00148f2)";

/// Prices of a machine, dollars per hour.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prices {
    /// On-demand price: without commitment and without interruptions.
    pub on_demand: f64,
    /// Spot price: the machine may be interrupted. `None` if there was no price.
    pub spot: Option<f64>,
}

impl Prices {
    /// Prices of one of `parts` equal shares of the machine.
    pub(crate) const fn share(self, parts: u32) -> Self {
        let parts = parts as f64;
        let spot = match self.spot {
            Some(spot) => Some(spot / parts),
            None => None,
        };
        Self { on_demand: self.on_demand / parts, spot }
    }
}

/// One T4.
pub const G4DN_XLARGE: Prices = Prices { on_demand: 0.526, spot: Some(0.2039) };
/// Four V100.
pub const P3_8XLARGE: Prices = Prices { on_demand: 12.24, spot: Some(1.4595) };
/// Four A10G.
pub const G5_12XLARGE: Prices = Prices { on_demand: 5.672, spot: Some(2.1824) };
/// One L4.
pub const G6_XLARGE: Prices = Prices { on_demand: 0.8048, spot: Some(0.3821) };
/// Four L4.
pub const G6_12XLARGE: Prices = Prices { on_demand: 4.6016, spot: Some(1.9992) };
/// Eight A100.
pub const P4D_24XLARGE: Prices = Prices { on_demand: 21.957_642, spot: Some(8.0001) };
/// One H100; no zone of us-east-1 had a spot price.
pub const P5_4XLARGE: Prices = Prices { on_demand: 6.88, spot: None };
/// Eight H200.
pub const P5EN_48XLARGE: Prices = Prices { on_demand: 63.296, spot: Some(17.4022) };
