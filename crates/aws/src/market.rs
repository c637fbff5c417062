//! Prices of machines per availability zone, and the choice of zones. The choice is a pure function.

use std::collections::BTreeMap;

use baton_console::failure::bad_input;
use baton_job::exit::Failure;
use serde_json::Value;

use crate::api::Api;

/// An availability zone that offers the machine type.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Zone {
    pub(super) name: String,
    /// Id of the subnet for machines in this zone.
    pub(super) subnet: String,
    /// Current spot price, dollars per hour; `None` if AWS gives none.
    pub(super) spot: Option<f64>,
}

/// The VPC's id, and its zones that offer this machine type, cheapest first.
pub(super) fn zones(
    api: &impl Api,
    machine: &str,
    subnets: &[String],
) -> Result<(String, Vec<Zone>), Failure> {
    let (vpc, subnets) = network(api, subnets)?;
    let offered = api.json(&[
        "ec2",
        "describe-instance-type-offerings",
        "--location-type",
        "availability-zone",
        "--filters",
        &format!("Name=instance-type,Values={machine}"),
    ])?;
    let offered: Vec<&str> = list(&offered, "InstanceTypeOfferings")
        .filter_map(|offer| offer["Location"].as_str())
        .collect();
    let prices = prices(api, machine)?;
    let mut zones: Vec<Zone> = subnets
        .into_iter()
        .filter(|(zone, _)| offered.contains(&zone.as_str()))
        .map(|(name, subnet)| Zone { spot: prices.get(&name).copied(), name, subnet })
        .collect();
    if zones.is_empty() {
        return Err(bad_input(match offered.is_empty() {
            true => {
                format!("this region has no {machine}: choose another --region or --instance-type")
            }
            false => format!(
                "only {} offers {machine}, and this network has no subnet there: give one with --subnet",
                offered.join(", ")
            ),
        }));
    }
    let key = |zone: &Zone| zone.spot.unwrap_or(f64::INFINITY);
    zones.sort_by(|a, b| key(a).total_cmp(&key(b)).then_with(|| a.name.cmp(&b.name)));
    Ok((vpc, zones))
}

/// The VPC's id, and its subnets by zone: the given ones, or else the default subnets.
fn network(api: &impl Api, given: &[String]) -> Result<(String, Vec<(String, String)>), Failure> {
    let mut arguments = vec!["ec2", "describe-subnets"];
    match given.is_empty() {
        true => arguments.extend(["--filters", "Name=default-for-az,Values=true"]),
        false => {
            arguments.push("--subnet-ids");
            arguments.extend(given.iter().map(String::as_str));
        }
    }
    let answer = api.json(&arguments)?;
    let text = |subnet: &Value, key: &str| subnet[key].as_str().unwrap_or_default().to_owned();
    let subnets: Vec<&Value> = list(&answer, "Subnets").collect();
    let Some(vpc) = subnets.first().map(|subnet| text(subnet, "VpcId")) else {
        return Err(bad_input(
            "this region has no default network: give a subnet with --subnet, or create the network (`aws ec2 create-default-vpc`)",
        ));
    };
    if subnets.iter().any(|subnet| text(subnet, "VpcId") != vpc) {
        return Err(bad_input(
            "the subnets belong to several networks: give subnets of one network",
        ));
    }
    let by_zone: BTreeMap<String, String> = subnets
        .iter()
        .map(|subnet| (text(subnet, "AvailabilityZone"), text(subnet, "SubnetId")))
        .collect();
    Ok((vpc, by_zone.into_iter().collect()))
}

/// Current spot prices by zone, dollars per hour.
fn prices(api: &impl Api, machine: &str) -> Result<BTreeMap<String, f64>, Failure> {
    let now = humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string();
    let answer = api.json(&[
        "ec2",
        "describe-spot-price-history",
        "--instance-types",
        machine,
        "--product-descriptions",
        "Linux/UNIX",
        "--start-time",
        &now,
    ])?;
    let price = |entry: &Value| {
        let price = entry["SpotPrice"].as_str()?.parse().ok()?;
        Some((entry["AvailabilityZone"].as_str()?.to_owned(), price))
    };
    Ok(list(&answer, "SpotPriceHistory").filter_map(price).collect())
}

/// Constraint on the zones of a job's machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ZoneChoice {
    /// Any zones, because all lasting data is in a bucket.
    AnyZone,
    /// All in one zone, because there are several nodes or a new volume.
    OneZone,
    /// All in this zone, because a volume is there or the user chose it.
    Zone(String),
}

/// Chooses the zones to use from those offered.
pub(super) fn choose(
    zones: Vec<Zone>,
    placement: &ZoneChoice,
    machine: &str,
    max_price: Option<f64>,
) -> Result<Vec<Zone>, Failure> {
    let all: Vec<String> = zones.iter().map(|zone| zone.name.clone()).collect();
    let chosen: Vec<Zone> = match placement {
        ZoneChoice::AnyZone => zones,
        ZoneChoice::OneZone => zones.into_iter().take(1).collect(),
        ZoneChoice::Zone(name) => zones.into_iter().filter(|zone| zone.name == *name).collect(),
    };
    let Some(cheapest) = chosen.first() else {
        let ZoneChoice::Zone(name) = placement else { return Ok(chosen) };
        return Err(bad_input(format!(
            "the job must run in {name}, which has no {machine} or no subnet in this network; available zones: {}. To move a volume, use a snapshot of it: --snapshot",
            all.join(", ")
        )));
    };
    if let (Some(limit), Some(price)) = (max_price, cheapest.spot)
        && price > limit
    {
        return Err(bad_input(format!(
            "a spot {machine} costs ${price:.2} per hour in {} now, above --max-price {limit}: raise the limit, or wait",
            cheapest.name
        )));
    }
    Ok(chosen)
}

/// Elements of the list `key` in an answer; none if there is no such list.
pub(super) fn list<'a>(answer: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    answer[key].as_array().map(Vec::as_slice).unwrap_or_default().iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::ScriptedApi;
    use serde_json::json;

    fn zone(name: &str, spot: f64) -> Zone {
        Zone { name: name.to_owned(), subnet: format!("subnet-{name}"), spot: Some(spot) }
    }

    #[test]
    fn zones_with_machine_and_subnet_are_sorted_by_price() {
        let api = ScriptedApi::new()
            .answer("describe-subnets", json!({"Subnets": [
                {"SubnetId": "s-a", "VpcId": "vpc", "AvailabilityZone": "a"},
                {"SubnetId": "s-b", "VpcId": "vpc", "AvailabilityZone": "b"},
                {"SubnetId": "s-c", "VpcId": "vpc", "AvailabilityZone": "c"},
                {"SubnetId": "s-d", "VpcId": "vpc", "AvailabilityZone": "d"}]}))
            .answer("describe-instance-type-offerings", json!({"InstanceTypeOfferings": [{"Location": "a"}, {"Location": "b"}, {"Location": "d"}]}))
            .answer("describe-spot-price-history", json!({"SpotPriceHistory": [
                {"AvailabilityZone": "a", "SpotPrice": "9.5"}, {"AvailabilityZone": "b", "SpotPrice": "8.25"}, {"AvailabilityZone": "c", "SpotPrice": "1.0"}]}));
        let (vpc, zones) = zones(&api, "p4d.24xlarge", &[]).unwrap();
        let found: Vec<_> = zones
            .iter()
            .map(|zone| (zone.name.as_str(), zone.subnet.as_str(), zone.spot))
            .collect();
        assert_eq!(vpc, "vpc");
        assert_eq!(found, [("b", "s-b", Some(8.25)), ("a", "s-a", Some(9.5)), ("d", "s-d", None)]);
    }

    #[test]
    fn a_job_with_a_volume_runs_in_its_zone_and_others_in_the_cheapest() {
        let zones = || vec![zone("b", 8.25), zone("a", 9.5)];
        let names = |placement: &ZoneChoice| {
            let chosen = choose(zones(), placement, "p4d.24xlarge", Some(10.0)).unwrap();
            chosen.into_iter().map(|zone| zone.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&ZoneChoice::AnyZone), ["b", "a"]);
        assert_eq!(names(&ZoneChoice::OneZone), ["b"]);
        assert_eq!(names(&ZoneChoice::Zone("a".to_owned())), ["a"]);
    }

    #[test]
    fn a_price_above_the_limit_and_a_zone_without_the_machine_are_refused() {
        let too_expensive =
            choose(vec![zone("b", 8.25)], &ZoneChoice::AnyZone, "p4d.24xlarge", Some(8.0))
                .unwrap_err();
        assert!(
            too_expensive.message.contains("$8.25")
                && too_expensive.message.contains("--max-price 8"),
            "{too_expensive}"
        );
        let elsewhere =
            choose(vec![zone("b", 8.25)], &ZoneChoice::Zone("c".to_owned()), "p4d.24xlarge", None)
                .unwrap_err();
        assert!(
            elsewhere.message.contains("run in c") && elsewhere.message.contains("zones: b"),
            "{elsewhere}"
        );
    }
}
