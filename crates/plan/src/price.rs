//! What machines cost. Prices change: this is the one place to change them, and `--price` goes round it.
//!
//! Amazon EC2 in us-east-1, Linux, dollars per hour of the whole instance. On-demand prices are AWS's
//! price list; spot prices are the medians over the availability zones at one moment, when those of
//! p4d.24xlarge went from $2.47 to $8.19. Both were read from the catalogue that the SkyPilot
//! project makes from AWS's price API (`catalogs/v8/aws/vms.csv` of `skypilot-org/skypilot-catalog`,
//! commit 00148f2af367), which also tells vCPUs and GPU memory. When that commit was made is not known:
//! the copy at hand has no dates. Zones that give no spot price are left out.

/// When the table was looked up.
pub const LOOKED_UP: &str = "2026-11-22";
/// Where from.
pub const SOURCE: &str = "AWS price list, us-east-1, by SkyPilot's catalogue (commit 00148f2)";

/// Dollars per hour.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prices {
    /// Without a commitment, never taken away.
    pub on_demand: f64,
    /// Of capacity that may be taken away; absent where there was none.
    pub spot: Option<f64>,
}

impl Prices {
    /// Of an equal part of the machine.
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
/// One H100; no zone of us-east-1 gave a spot price.
pub const P5_4XLARGE: Prices = Prices { on_demand: 6.88, spot: None };
/// Eight H200.
pub const P5EN_48XLARGE: Prices = Prices { on_demand: 63.296, spot: Some(17.4022) };
