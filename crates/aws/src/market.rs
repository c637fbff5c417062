//! What machines cost where, and in which zones to be. The choice is pure.

use std::collections::BTreeMap;

use baton_console::failure::bad_input;
use baton_job::exit::Failure;
use serde_json::Value;

use crate::api::Api;

/// An availability zone that has the machine.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Zone {
    pub(super) name: String,
    /// Where machines may be put in it.
    pub(super) subnet: String,
    /// Dollars per hour of a spot machine now; unknown where AWS gives none.
    pub(super) spot: Option<f64>,
}

/// The zones of a network that rent this machine, the cheapest first.
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
                format!("this region has no {machine}: give another --region or --instance-type")
            }
            false => format!(
                "{machine} is in {} only, where this network has no subnet: give one with --subnet",
                offered.join(", ")
            ),
        }));
    }
    let key = |zone: &Zone| zone.spot.unwrap_or(f64::INFINITY);
    zones.sort_by(|a, b| key(a).total_cmp(&key(b)).then_with(|| a.name.cmp(&b.name)));
    Ok((vpc, zones))
}

/// The VPC and, by zone, its subnets: those given, else the default ones.
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
            "this region has no default network: give a subnet with --subnet, or make one (`aws ec2 create-default-vpc`)",
        ));
    };
    if subnets.iter().any(|subnet| text(subnet, "VpcId") != vpc) {
        return Err(bad_input("the subnets are of several networks: give those of one"));
    }
    let by_zone: BTreeMap<String, String> = subnets
        .iter()
        .map(|subnet| (text(subnet, "AvailabilityZone"), text(subnet, "SubnetId")))
        .collect();
    Ok((vpc, by_zone.into_iter().collect()))
}

/// Today's spot prices by zone.
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

/// Where a job's machines have to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    /// Anywhere: all that lasts is in a bucket.
    Free,
    /// Close together: several nodes, or a volume to be made.
    OneZone,
    /// In this one: a volume is there, or the user wants it.
    To(String),
}

/// The zones to use.
pub(super) fn choose(
    zones: Vec<Zone>,
    bound: &Bound,
    machine: &str,
    max_price: Option<f64>,
) -> Result<Vec<Zone>, Failure> {
    let all: Vec<String> = zones.iter().map(|zone| zone.name.clone()).collect();
    let chosen: Vec<Zone> = match bound {
        Bound::Free => zones,
        Bound::OneZone => zones.into_iter().take(1).collect(),
        Bound::To(name) => zones.into_iter().filter(|zone| zone.name == *name).collect(),
    };
    let Some(cheapest) = chosen.first() else {
        let Bound::To(name) = bound else { return Ok(chosen) };
        return Err(bad_input(format!(
            "{name}, where the job has to be, has no {machine} or no subnet here; there is one in {}. A volume is moved by a snapshot: --snapshot",
            all.join(", ")
        )));
    };
    if let (Some(most), Some(price)) = (max_price, cheapest.spot)
        && price > most
    {
        return Err(bad_input(format!(
            "a spot {machine} is ${price:.2} an hour in {} now, above --max-price {most}: raise it, or wait",
            cheapest.name
        )));
    }
    Ok(chosen)
}

/// The elements of a list in an answer.
pub(super) fn list<'a>(answer: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    answer[key].as_array().map(Vec::as_slice).unwrap_or_default().iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Script;
    use serde_json::json;

    fn zone(name: &str, spot: f64) -> Zone {
        Zone { name: name.to_owned(), subnet: format!("subnet-{name}"), spot: Some(spot) }
    }

    #[test]
    fn zones_are_those_that_have_machine_and_subnet_the_cheapest_first() {
        let api = Script::new()
            .answer("describe-subnets", json!({"Subnets": [
                {"SubnetId": "s-a", "VpcId": "vpc", "AvailabilityZone": "a"},
                {"SubnetId": "s-b", "VpcId": "vpc", "AvailabilityZone": "b"},
                {"SubnetId": "s-c", "VpcId": "vpc", "AvailabilityZone": "c"},
                {"SubnetId": "s-d", "VpcId": "vpc", "AvailabilityZone": "d"}]}))
            .answer("describe-instance-type-offerings", json!({"InstanceTypeOfferings": [{"Location": "a"}, {"Location": "b"}, {"Location": "d"}]}))
            .answer("describe-spot-price-history", json!({"SpotPriceHistory": [
                {"AvailabilityZone": "a", "SpotPrice": "9.5"}, {"AvailabilityZone": "b", "SpotPrice": "8.25"}, {"AvailabilityZone": "c", "SpotPrice": "1.0"}]}));
        let (vpc, zones) = zones(&api, "p4d.24xlarge", &[]).unwrap();
        let told: Vec<_> = zones
            .iter()
            .map(|zone| (zone.name.as_str(), zone.subnet.as_str(), zone.spot))
            .collect();
        assert_eq!(vpc, "vpc");
        assert_eq!(told, [("b", "s-b", Some(8.25)), ("a", "s-a", Some(9.5)), ("d", "s-d", None)]);
    }

    #[test]
    fn a_job_with_a_volume_goes_where_it_is_and_others_where_it_is_cheap() {
        let zones = || vec![zone("b", 8.25), zone("a", 9.5)];
        let names = |bound: &Bound| {
            let chosen = choose(zones(), bound, "p4d.24xlarge", Some(10.0)).unwrap();
            chosen.into_iter().map(|zone| zone.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&Bound::Free), ["b", "a"]);
        assert_eq!(names(&Bound::OneZone), ["b"]);
        assert_eq!(names(&Bound::To("a".to_owned())), ["a"]);
    }

    #[test]
    fn a_price_above_the_limit_and_a_zone_without_the_machine_are_refused() {
        let too_dear =
            choose(vec![zone("b", 8.25)], &Bound::Free, "p4d.24xlarge", Some(8.0)).unwrap_err();
        assert!(
            too_dear.message.contains("$8.25") && too_dear.message.contains("--max-price 8"),
            "{too_dear}"
        );
        let elsewhere =
            choose(vec![zone("b", 8.25)], &Bound::To("c".to_owned()), "p4d.24xlarge", None)
                .unwrap_err();
        assert!(
            elsewhere.message.contains("c, where") && elsewhere.message.contains("in b"),
            "{elsewhere}"
        );
    }
}
