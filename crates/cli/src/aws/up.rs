//! `baton aws up`

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use baton_job::{
    JobSpec,
    exit::{self, Failure},
};
use baton_plan::{Machine as Known, Question};

use super::{
    Place,
    api::Api,
    bundle,
    fleet::{self, Fleet},
    market::{self, Bound, Zone, list},
    recipe::{self, Moved},
    stack::{self, Job, Stack},
    status,
};
use crate::{
    commands::recipe::{Samples, about, find, read},
    failure::{bad_input, failed},
    human, output,
};

/// Launch a job on spot machines; run it again to go on where it stopped
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton aws up resnet50_p4d_60ep --set data.train=s3://imagenet/train.beton --set data.val=s3://imagenet/val.beton
  baton aws up resnet50_p4d_60ep --volume-gb 400 --snapshot snap-0123456789abcdef0     data on a volume, at /data
  baton aws up recipe.toml --instance-type g6.12xlarge --max-price 2.50
  baton aws up recipe.toml --nodes 4
  baton aws up recipes/digits_cpu.toml --instance-type c7i.xlarge --on-demand          a first try, for cents
  baton aws up recipe.toml --stage-only        bring the files, print the CloudFormation command, launch nothing

It shows prices and asks before anything costs money. A machine that is taken away is replaced, and training goes on;
when the job is over, its machines end themselves. `baton aws down` removes the rest.")]
pub(crate) struct Args {
    /// The job: a recipe, or the name of one in recipes/
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Name of the job [default: the recipe's]
    #[arg(long, value_name = "NAME")]
    name: Option<Job>,
    /// Change one value of the recipe, e.g. --set train.epochs=3; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    place: Place,
    /// Bucket for programs, checkpoints and logs [default: baton-ACCOUNT-REGION, made if it is not there]
    #[arg(long, value_name = "BUCKET")]
    bucket: Option<String>,
    /// Machine to rent
    #[arg(long, value_name = "TYPE", default_value = "p4d.24xlarge")]
    instance_type: String,
    /// Machines with GPUs; with several, the coordinator gets a small one of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=128))]
    nodes: u32,
    /// Rent machines that are not taken away, at the full price
    #[arg(long)]
    on_demand: bool,
    /// Most dollars per hour and machine [default: the on-demand price]
    #[arg(long, value_name = "USD", conflicts_with = "on_demand", value_parser = dollars)]
    max_price: Option<f64>,
    /// Make a volume of this size for /data; the one of an earlier launch is found by itself
    #[arg(long, value_name = "GB", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    volume_gb: Option<u32>,
    /// Snapshot that the new volume begins with
    #[arg(long, value_name = "SNAPSHOT", requires = "volume_gb")]
    snapshot: Option<String>,
    /// Availability zone [default: the volume's, else the cheapest, else all]
    #[arg(long, value_name = "ZONE")]
    zone: Option<String>,
    /// Subnet in which machines may be; may be repeated [default: those of the default network]
    #[arg(long = "subnet", value_name = "SUBNET")]
    subnets: Vec<String>,
    /// Image of your own, with NVIDIA's driver and the AWS CLI [default: Amazon's newest for deep learning]
    #[arg(long, value_name = "AMI")]
    image: Option<String>,
    /// Show prices and bring the files, then print the CloudFormation command instead of running it
    #[arg(long)]
    stage_only: bool,
    /// Do not wait until it trains
    #[arg(long)]
    no_wait: bool,
    /// Ask nothing
    #[arg(short, long)]
    yes: bool,
}

/// Between two looks at the machines.
const INTERVAL: Duration = Duration::from_secs(8);

pub(super) fn run(args: &Args) -> Result<u8, Failure> {
    let path = find(&args.recipe);
    let spec = read(&path, &args.overrides)?;
    let api = args.place.api();
    let Some(launched) = launch(&api, args, &path, spec)? else { return Ok(exit::OK) };
    if args.no_wait {
        output::line(format_args!(
            "{} is launched; `baton aws status --name {}` tells how it goes",
            launched.job, launched.job
        ));
        return Ok(exit::OK);
    }
    follow(&api, &launched)
}

/// A job whose stack is there.
struct Launched {
    job: Job,
    stack: Stack,
    /// Reports from before are of an earlier launch.
    since: u64,
}

fn launch(
    api: &impl Api,
    args: &Args,
    path: &Path,
    spec: JobSpec,
) -> Result<Option<Launched>, Failure> {
    let name = args.name.clone().map_or_else(|| Job::of_recipe(&spec.name), Ok);
    let job = name.map_err(|problem| about(path, problem))?;
    let account = api.json(&["sts", "get-caller-identity"])?;
    let there = stack::find(api, &job)?;
    if let Some(stack) = &there
        && let Some(launched) = running(api, &job, stack)?
    {
        return Ok(Some(launched));
    }

    let volume = volume(api, &job)?;
    if volume.is_some() && args.nodes > 1 {
        return Err(bad_input(format!(
            "{job} has a volume, which one machine only can have: name another job with --name for several nodes"
        )));
    }
    if args.volume_gb.is_some() && args.nodes > 1 {
        return Err(bad_input(
            "--volume-gb is for one machine: several nodes read their data from a bucket",
        ));
    }
    let has_volume = volume.is_some() || args.volume_gb.is_some();
    let bound = match (&volume, &args.zone) {
        (Some(volume), _) => Bound::To(volume.zone.clone()),
        (None, Some(zone)) => Bound::To(zone.clone()),
        (None, None) if has_volume || args.nodes > 1 => Bound::OneZone,
        (None, None) => Bound::Free,
    };
    let (vpc, zones) = market::zones(api, &args.instance_type, &args.subnets)?;
    let zones = market::choose(zones, &bound, &args.instance_type, args.max_price)?;

    let region = region(&zones);
    let bucket = match (&args.bucket, &there) {
        (Some(bucket), _) => bucket.clone(),
        (None, Some(stack)) => stack.parameter("Bucket").to_owned(),
        (None, None) => {
            format!("baton-{}-{region}", account["Account"].as_str().unwrap_or_default())
        }
    };
    let mut moved = recipe::moved(spec, &job, &bucket, has_volume, Path::exists)
        .map_err(|problem| about(path, problem))?;
    let prices = Prices::of(args, &zones);
    // For the job's own account of what it costs.
    if let (None, Some(price)) = (moved.spec.limits.dollars_per_hour, prices.of_a_machine) {
        moved.spec.limits.dollars_per_hour = Some(price * f64::from(args.nodes));
    }
    for line in summary(&job, args, &zones, &prices, volume.as_ref(), &moved) {
        output::note(line);
    }
    if !args.yes && !args.stage_only {
        match output::confirm("launch?") {
            Some(true) => {}
            Some(false) => return Err(bad_input("nothing was launched")),
            None => {
                return Err(bad_input("nobody can be asked here: add --yes; nothing was launched"));
            }
        }
    }

    ensure_bucket(api, &bucket, &region)?;
    for (file, url) in &moved.uploads {
        upload(api, file, url)?;
    }
    let place = format!("s3://{bucket}/{job}");
    let digest = bundle::stage(api, &place, &moved.spec.to_toml(), moved.pretrained.as_deref())?;
    let parameters = parameters(args, &job, &bucket, digest, &vpc, &zones, volume.as_ref(), &moved);
    if args.stage_only {
        output::line(command(&job, &parameters));
        return Ok(None);
    }
    let since = fleet::now();
    output::note(format_args!("making the stack {}", job.stack()));
    let stack = stack::deploy(api, &job, &parameters)?;
    want(api, &job, &stack, args.nodes)?;
    Ok(Some(Launched { job, stack, since }))
}

/// A job that has machines is left as it is: what they run is what they were started with.
fn running(api: &impl Api, job: &Job, stack: &Stack) -> Result<Option<Launched>, Failure> {
    let answer = api.json(&[
        "autoscaling",
        "describe-auto-scaling-groups",
        "--auto-scaling-group-names",
        &job.stack(),
    ])?;
    let wanted = list(&answer, "AutoScalingGroups")
        .next()
        .and_then(|group| group["DesiredCapacity"].as_u64())
        .unwrap_or(0);
    if wanted == 0 {
        return Ok(None);
    }
    output::note(format_args!(
        "{job} has its machines: they go on as they are. For another recipe or other machines, `baton aws connect -- drain` first"
    ));
    Ok(Some(Launched { job: job.clone(), stack: stack.clone(), since: 0 }))
}

/// A job that was over has set its group to 0, which the stack does not know of.
fn want(api: &impl Api, job: &Job, stack: &Stack, nodes: u32) -> Result<(), Failure> {
    let answer = api.json(&[
        "autoscaling",
        "describe-auto-scaling-groups",
        "--auto-scaling-group-names",
        &job.stack(),
    ])?;
    let wanted = list(&answer, "AutoScalingGroups")
        .next()
        .and_then(|group| group["DesiredCapacity"].as_u64());
    if wanted != Some(u64::from(nodes)) {
        let nodes = nodes.to_string();
        api.json(&[
            "autoscaling",
            "set-desired-capacity",
            "--auto-scaling-group-name",
            &job.stack(),
            "--desired-capacity",
            &nodes,
        ])?;
    }
    if let Some(coordinator) = stack.outputs.get("Coordinator") {
        // It stops itself when its job is over. Of one that runs, this changes nothing.
        api.json(&["ec2", "start-instances", "--instance-ids", coordinator])?;
    }
    Ok(())
}

/// A volume of the job from an earlier launch.
struct Volume {
    id: String,
    zone: String,
    gigabytes: u64,
}

fn volume(api: &impl Api, job: &Job) -> Result<Option<Volume>, Failure> {
    let answer = api.json(&[
        "ec2",
        "describe-volumes",
        "--filters",
        &format!("Name=tag:baton:job,Values={job}"),
    ])?;
    let mut volumes: Vec<Volume> = list(&answer, "Volumes")
        .filter_map(|volume| {
            Some(Volume {
                id: volume["VolumeId"].as_str()?.to_owned(),
                zone: volume["AvailabilityZone"].as_str()?.to_owned(),
                gigabytes: volume["Size"].as_u64()?,
            })
        })
        .collect();
    if volumes.len() > 1 {
        let ids: Vec<&str> = volumes.iter().map(|volume| volume.id.as_str()).collect();
        return Err(bad_input(format!(
            "several volumes have the tag baton:job = {job} ({}): leave it to the one that is meant",
            ids.join(", ")
        )));
    }
    Ok(volumes.pop())
}

/// A zone's name is its region's and a letter.
fn region(zones: &[Zone]) -> String {
    zones
        .first()
        .map(|zone| zone.name.trim_end_matches(|c: char| c.is_ascii_lowercase()).to_owned())
        .unwrap_or_default()
}

/// What a machine costs per hour.
struct Prices {
    of_a_machine: Option<f64>,
    on_demand: Option<f64>,
}

impl Prices {
    fn of(args: &Args, zones: &[Zone]) -> Self {
        let known = Known::named(&args.instance_type).ok();
        let on_demand = known.map(|machine| machine.prices.on_demand);
        let spot = zones.iter().filter_map(|zone| zone.spot).next();
        Self { of_a_machine: if args.on_demand { on_demand } else { spot }, on_demand }
    }
}

fn summary(
    job: &Job,
    args: &Args,
    zones: &[Zone],
    prices: &Prices,
    volume: Option<&Volume>,
    moved: &Moved,
) -> Vec<String> {
    let mut lines = vec![format!("{job}: {} x {}", args.nodes, args.instance_type)];
    for zone in zones {
        lines.push(match (args.on_demand, zone.spot) {
            (true, _) => format!("  {}", zone.name),
            (false, Some(price)) => {
                format!("  {}: ${price:.4} an hour and machine now, spot", zone.name)
            }
            (false, None) => format!("  {}: AWS gives no spot price", zone.name),
        });
    }
    match (prices.of_a_machine, prices.on_demand) {
        (Some(now), Some(on_demand)) if now < on_demand => {
            lines.push(format!(
                "  on demand ${on_demand:.2} (table of {}): {} less",
                baton_plan::price::LOOKED_UP,
                human::percent(1.0 - now / on_demand)
            ));
        }
        _ => {}
    }
    if let Some(price) = prices.of_a_machine {
        let all = price * f64::from(args.nodes);
        let capped = args.max_price.map_or_else(String::new, |most| {
            format!(", never more than ${:.2}", most * f64::from(args.nodes))
        });
        lines.push(format!("  machines: ${all:.2} an hour{capped}"));
        lines.extend(estimate(args, moved, price));
    }
    match (volume, args.volume_gb) {
        (Some(volume), _) => lines.push(format!("  volume {} ({} GB) in {}, from an earlier launch", volume.id, volume.gigabytes, volume.zone)),
        (None, Some(gigabytes)) => lines.push(format!("  a new volume of {gigabytes} GB at /data, which stays until `baton aws down --delete-data`")),
        (None, None) => {}
    }
    lines.push(format!("  checkpoints: {}", moved.spec.checkpoint.dir));
    for (file, url) in &moved.uploads {
        lines.push(format!("  {} goes to {url}", file.display()));
    }
    lines
}

/// Time and money by `baton plan`, where it knows machine and data.
fn estimate(args: &Args, moved: &Moved, price: f64) -> Option<String> {
    let machine = Known::named(&args.instance_type).ok()?;
    let samples = |place: &str| {
        let here = moved
            .uploads
            .iter()
            .find(|(_, url)| url == place)
            .map(|(file, _)| file.display().to_string());
        match Samples::at(here.as_deref().unwrap_or(place), None).ok()? {
            Samples::Known(samples) => Some(samples),
            Samples::Unknown(_) => None,
        }
    };
    let question = Question {
        spec: &moved.spec,
        samples: samples(&moved.spec.data.train)?,
        val_samples: samples(&moved.spec.data.val)?,
        signal: [1, 100],
        dollars_per_hour: Some(price),
        calibration: None,
    };
    let plan = question.plan(machine).ok()?;
    (args.nodes == 1).then(|| {
        format!(
            "  `baton plan` reckons {}, ${:.2}; nothing was measured",
            human::duration(plan.seconds),
            plan.seconds / 3_600.0 * price
        )
    })
}

fn ensure_bucket(api: &impl Api, bucket: &str, region: &str) -> Result<(), Failure> {
    if api.find(&["s3api", "head-bucket", "--bucket", bucket])?.is_some() {
        return Ok(());
    }
    output::note(format_args!("making the bucket {bucket}, closed to the public"));
    let mut arguments = vec!["s3api", "create-bucket", "--bucket", bucket];
    let constraint = format!("LocationConstraint={region}");
    // The one region that must not be named.
    if region != "us-east-1" {
        arguments.extend(["--create-bucket-configuration", &constraint]);
    }
    api.json(&arguments)?;
    let closed = "BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true";
    api.json(&[
        "s3api",
        "put-public-access-block",
        "--bucket",
        bucket,
        "--public-access-block-configuration",
        closed,
    ])?;
    Ok(())
}

/// Unless one of the same size is there.
fn upload(api: &impl Api, file: &Path, url: &str) -> Result<(), Failure> {
    let bytes =
        file.metadata().map_err(|error| failed(format!("{}: {error}", file.display())))?.len();
    let (bucket, key) = url.trim_start_matches("s3://").split_once('/').unwrap_or_default();
    let there = api.find(&["s3api", "head-object", "--bucket", bucket, "--key", key])?;
    if there.is_some_and(|there| there["ContentLength"].as_u64() == Some(bytes)) {
        return Ok(());
    }
    output::note(format_args!("bringing {} ({}) to {url}", file.display(), human::bytes(bytes)));
    api.call(&["s3", "cp", "--only-show-errors", &file.display().to_string(), url], &[])?;
    Ok(())
}

#[allow(clippy::too_many_arguments, reason = "what the template is told comes from everywhere")]
fn parameters(
    args: &Args,
    job: &Job,
    bucket: &str,
    digest: String,
    vpc: &str,
    zones: &[Zone],
    volume: Option<&Volume>,
    moved: &Moved,
) -> BTreeMap<&'static str, String> {
    let subnets: Vec<&str> = zones.iter().map(|zone| zone.subnet.as_str()).collect();
    // EFA is of use among nodes only; of the others' adapters nothing is known here.
    let efa = if args.nodes > 1 && args.instance_type == "p4d.24xlarge" { "4" } else { "0" };
    let mut parameters = BTreeMap::from([
        ("Job", job.name().to_owned()),
        ("Bucket", bucket.to_owned()),
        ("BundleDigest", digest),
        ("DataBucket", moved.data_bucket.clone().unwrap_or_default()),
        ("InstanceType", args.instance_type.clone()),
        ("Nodes", args.nodes.to_string()),
        ("Market", if args.on_demand { "on-demand" } else { "spot" }.to_owned()),
        ("MaxPrice", args.max_price.map(|price| price.to_string()).unwrap_or_default()),
        ("Image", args.image.clone().unwrap_or_default()),
        ("EfaInterfaces", efa.to_owned()),
        ("Vpc", vpc.to_owned()),
        ("Subnets", subnets.join(",")),
    ]);
    match (volume, args.volume_gb) {
        (Some(volume), _) => {
            parameters.insert("VolumeId", volume.id.clone());
        }
        (None, Some(gigabytes)) => {
            parameters.insert("VolumeGb", gigabytes.to_string());
            parameters.insert(
                "VolumeZone",
                zones.first().map(|zone| zone.name.clone()).unwrap_or_default(),
            );
            parameters.insert("Snapshot", args.snapshot.clone().unwrap_or_default());
        }
        (None, None) => {}
    }
    parameters
}

/// The same by hand.
fn command(job: &Job, parameters: &BTreeMap<&str, String>) -> String {
    let given = parameters.iter().filter(|(_, value)| !value.is_empty());
    let given: Vec<String> = given.map(|(key, value)| format!("{key}={value}")).collect();
    format!(
        "aws cloudformation deploy --stack-name {} --template-file deploy/aws/baton.yaml --capabilities CAPABILITY_IAM \\\n    --tags baton:job={job} --parameter-overrides {}",
        job.stack(),
        given.join(" ")
    )
}

/// Waits until it trains, and tells what happens till then.
fn follow(api: &impl Api, launched: &Launched) -> Result<u8, Failure> {
    let Launched { job, stack, since } = launched;
    output::note("waiting until it trains; Ctrl-C ends the waiting, not the job");
    let (mut told, start) = (Vec::new(), Instant::now());
    loop {
        let fleet = Fleet::look(api, job, stack)?;
        for line in news(&fleet, *since) {
            if !told.contains(&line) {
                output::note(format_args!(
                    "  {}: {line}",
                    human::duration(start.elapsed().as_secs_f64())
                ));
                told.push(line);
            }
        }
        let report = fleet::report(api, stack)?.filter(|report| report.unix_seconds >= *since);
        let phase =
            report.as_ref().and_then(|report| report.status["phase"].as_str()).unwrap_or_default();
        if fleet.wanted == 0 || ["training", "evaluating", "saving"].contains(&phase) {
            output::line(status::text(job, stack, &fleet, report.as_ref(), fleet::now()));
            output::note(format_args!(
                "\nlook: baton aws status --name {job}     reach it: baton aws connect --name {job} -- top     end it: baton aws down --name {job}"
            ));
            return match fleet.wanted {
                0 => over(api, stack),
                _ => Ok(exit::OK),
            };
        }
        thread::sleep(INTERVAL);
    }
}

/// How a job ended that has no machines any more.
fn over(api: &impl Api, stack: &Stack) -> Result<u8, Failure> {
    let machines = fleet::written(api, stack, "stage.json")?;
    let last =
        machines.last().map(|instance| fleet::stage(api, stack, instance)).transpose()?.flatten();
    match last.map(|stage| stage.words) {
        Some(words) if words == "completed" => Ok(exit::OK),
        Some(words) => {
            Err(failed(format!("the job ended: {words}; `baton aws logs` shows the log")))
        }
        None => Err(failed(
            "the job ended before a machine told anything; `baton aws status` may tell why",
        )),
    }
}

fn news(fleet: &Fleet, since: u64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    lines.extend(fleet.trouble.iter().map(|trouble| format!("no machine: {trouble}")));
    for machine in &fleet.machines {
        lines.push(format!("{} in {} is {}", machine.instance, machine.zone, machine.state));
        let fresh = machine.stage.iter().filter(|stage| stage.unix_seconds >= since);
        lines.extend(fresh.map(|stage| format!("{}: {}", machine.instance, stage.words)));
    }
    lines
}

fn dollars(text: &str) -> Result<f64, String> {
    let price = text.parse::<f64>().ok().filter(|price| *price > 0.0 && price.is_finite());
    price.ok_or_else(|| "must be dollars per hour, e.g. 8.50".to_owned())
}
