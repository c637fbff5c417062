//! `baton aws up`

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use baton_console::{
    Samples,
    failure::{bad_input, failed},
    human, output,
    recipe::{about, find, read},
};
use baton_job::exit::{self, Failure};
use baton_plan::{Machine as Known, Question};
use baton_recipe::JobSpec;
use serde_json::Value;

use crate::{
    Place,
    api::Api,
    bundle,
    fleet::{self, Fleet},
    market::{self, Bound, Zone, list},
    recipe::{self, Moved},
    stack::{self, Job, Stack},
    status,
    volume::{self, Volume},
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
pub struct Args {
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

/// What gp3 gives with its 3,000 operations a second, in MiB/s; unasked it gives 125
/// (<https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html>).
const FAST: u32 = 750;
/// A volume that holds training data, in GB.
const FAST_FROM_GB: u32 = 100;
/// A machine that says nothing for so long after its start never will.
const SILENT: Duration = Duration::from_secs(300);
/// A group may be told of as it was before it was asked for machines.
const SETTLED: Duration = Duration::from_secs(30);
/// Phases of a job that has begun.
const BEGUN: [&str; 2] = ["training", "paused"];
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
    let has_volume = volume.is_some() || args.volume_gb.is_some();
    fits(args, &job, &spec, volume.is_some(), has_volume).map_err(bad_input)?;
    let coordinator =
        there.as_ref().map(|stack| Coordinator::of(api, stack)).transpose()?.flatten();
    if let (Some(Coordinator { zone, .. }), Some(wanted)) = (&coordinator, &args.zone)
        && zone != wanted
    {
        return Err(bad_input(format!(
            "the coordinator of {job} is in {zone}, and has the journal: leave --zone out, or `baton aws down` first"
        )));
    }
    let bound = match (&volume, &args.zone, &coordinator) {
        (Some(volume), _, _) => Bound::To(volume.zone.clone()),
        (None, Some(zone), _) => Bound::To(zone.clone()),
        (None, None, Some(coordinator)) => Bound::To(coordinator.zone.clone()),
        (None, None, None) if has_volume || args.nodes > 1 => Bound::OneZone,
        (None, None, None) => Bound::Free,
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

    // Of one that the user names, or once has, it is his affair whose it is.
    let is_ours = args.bucket.is_none() && there.is_none();
    let owner = is_ours.then(|| account["Account"].as_str()).flatten();
    ensure_bucket(api, &bucket, owner, &region)?;
    for (file, url) in &moved.uploads {
        upload(api, file, url)?;
    }
    let place = format!("s3://{bucket}/{job}");
    let digest = bundle::stage(api, &place, &moved.spec.to_toml(), moved.pretrained.as_deref())?;
    let mut parameters =
        parameters(args, &job, &bucket, digest, &vpc, &zones, volume.as_ref(), &moved);
    if let (Some(coordinator), None) = (&coordinator, &args.image) {
        // Another image would be another machine, without the journal.
        parameters.insert("Image", coordinator.image.clone());
    }
    if args.stage_only {
        output::line(command(&job, &parameters, args.nodes));
        return Ok(None);
    }
    make(api, job, &parameters, args.nodes).map(Some)
}

/// Makes the stack, then asks for machines: were their number in the template, a launch without capacity at that moment
/// would fail as a whole, in place of waiting for some.
fn make(
    api: &impl Api,
    job: Job,
    parameters: &BTreeMap<&'static str, String>,
    nodes: u32,
) -> Result<Launched, Failure> {
    let since = fleet::now();
    output::note(format_args!("making the stack {}", job.stack()));
    let stack = stack::deploy(api, &job, parameters)?;
    fleet::want(api, &job, nodes)?;
    if let Some(coordinator) = stack.outputs.get("Coordinator") {
        // It stops itself when its job is over. Of one that runs, this changes nothing.
        api.json(&["ec2", "start-instances", "--instance-ids", coordinator])?;
    }
    Ok(Launched { job, stack, since })
}

/// Whether what is asked for can do what it is paid for.
///
/// # Errors
/// One line: what cannot, and what to do.
fn fits(
    args: &Args,
    job: &Job,
    spec: &JobSpec,
    volume_exists: bool,
    has_volume: bool,
) -> Result<(), String> {
    if volume_exists && args.nodes > 1 {
        return Err(format!(
            "{job} has a volume, which one machine only can have: name another job with --name for several nodes"
        ));
    }
    if args.volume_gb.is_some() && args.nodes > 1 {
        return Err("--volume-gb is for one machine: several nodes read their data from a bucket"
            .to_owned());
    }
    if let Ok(machine) = Known::named(&args.instance_type) {
        let (most, gpus) = (spec.max_ranks(), machine.gpus);
        if most <= (args.nodes - 1) * gpus {
            return Err(format!(
                "--nodes {}: the recipe has {most} ranks at most, which need {} of {gpus} GPUs; the others would be paid for \
                 and idle. More ranks: --set train.virtual_ranks=… and --set cluster.max_ranks=…, at least {} to use \
                 all (docs/recipes.md)",
                args.nodes,
                human::count(u64::from(most.div_ceil(gpus)), "machine"),
                args.nodes * gpus
            ));
        }
    }
    let limits = &spec.limits;
    if args.nodes == 1
        && !has_volume
        && (limits.max_hours.is_some() || limits.max_dollars.is_some())
    {
        return Err(
            "limits.max_hours and limits.max_dollars are counted in the journal, which goes with the machine when there is no \
             volume, and would begin anew with each: add --volume-gb 10"
                .to_owned(),
        );
    }
    Ok(())
}

/// The coordinator's machine of an earlier launch on several nodes. Its disk has the journal.
struct Coordinator {
    zone: String,
    image: String,
}

impl Coordinator {
    fn of(api: &impl Api, stack: &Stack) -> Result<Option<Self>, Failure> {
        let Some(id) = stack.outputs.get("Coordinator") else { return Ok(None) };
        let answer = api.json(&[
            "ec2",
            "describe-instances",
            "--filters",
            &format!("Name=instance-id,Values={id}"),
            "Name=instance-state-name,Values=pending,running,stopping,stopped",
        ])?;
        let mut instances = list(&answer, "Reservations").flat_map(|one| list(one, "Instances"));
        Ok(instances.next().and_then(|instance| {
            Some(Self {
                zone: instance["Placement"]["AvailabilityZone"].as_str()?.to_owned(),
                image: instance["ImageId"].as_str()?.to_owned(),
            })
        }))
    }
}

/// A job that has machines is left as it is: what they run is what they were started with.
fn running(api: &impl Api, job: &Job, stack: &Stack) -> Result<Option<Launched>, Failure> {
    let wanted = fleet::wanted(&fleet::group(api, job)?);
    if wanted == 0 {
        return Ok(None);
    }
    // A node that failed by itself has left a smaller group.
    let nodes: u32 = stack.parameter("Nodes").parse().unwrap_or(1);
    let goes_on = if wanted < u64::from(nodes) {
        fleet::want(api, job, nodes)?;
        format!("{job} had {wanted} of {nodes} machines and gets the others; those that run go on")
    } else {
        format!("{job} has its machines: they go on")
    };
    output::note(format_args!(
        "{goes_on} as they are. For another recipe or other machines, `baton aws connect -- drain` first"
    ));
    Ok(Some(Launched { job: job.clone(), stack: stack.clone(), since: 0 }))
}

/// The volume of the job, if there is one from before.
fn volume(api: &impl Api, job: &Job) -> Result<Option<Volume>, Failure> {
    let mut volumes = volume::of(api, job)?;
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
        (Some(volume), asked) => {
            let unused =
                if asked.is_some() { ": --volume-gb and --snapshot make no other" } else { "" };
            lines.push(format!(
                "  volume {} ({} GB) in {}, from an earlier launch{unused}",
                volume.id, volume.gigabytes, volume.zone
            ));
        }
        (None, Some(gigabytes)) => {
            let fast = match gigabytes >= FAST_FROM_GB {
                true => format!(" and {FAST} MiB/s (about $25 a month of that)"),
                false => String::new(),
            };
            lines.push(format!("  a new volume of {gigabytes} GB{fast} at /data, which stays until `baton aws down --delete-data`"));
        }
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

fn ensure_bucket(
    api: &impl Api,
    bucket: &str,
    owner: Option<&str>,
    region: &str,
) -> Result<(), Failure> {
    let mut look = vec!["s3api", "head-bucket", "--bucket", bucket];
    if let Some(owner) = owner {
        // Anybody could have a bucket of this name, and open it.
        look.extend(["--expected-bucket-owner", owner]);
    }
    if api.find(&look)?.is_some() {
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
    // A machine that is taken away in the middle of an upload leaves parts that no listing shows.
    let rule = r#"{"Rules":[{"ID":"parts","Status":"Enabled","Filter":{"Prefix":""},"AbortIncompleteMultipartUpload":{"DaysAfterInitiation":2}}]}"#;
    api.json(&[
        "s3api",
        "put-bucket-lifecycle-configuration",
        "--bucket",
        bucket,
        "--lifecycle-configuration",
        rule,
    ])?;
    Ok(())
}

/// Unless one of the same size is there that is not older.
fn upload(api: &impl Api, file: &Path, url: &str) -> Result<(), Failure> {
    let about = |error| failed(format!("{}: {error}", file.display()));
    let metadata = file.metadata().map_err(about)?;
    let (bytes, changed) = (metadata.len(), metadata.modified().map_err(about)?);
    let (bucket, key) = url.trim_start_matches("s3://").split_once('/').unwrap_or_default();
    let there = api.find(&["s3api", "head-object", "--bucket", bucket, "--key", key])?;
    let is_same = |there: Value| {
        let brought = there["LastModified"].as_str()?.replace("+00:00", "Z");
        let brought = humantime::parse_rfc3339_weak(&brought).ok()?;
        Some(there["ContentLength"].as_u64() == Some(bytes) && brought >= changed)
    };
    if there.and_then(is_same) == Some(true) {
        return Ok(());
    }
    output::note(format_args!("bringing {} ({}) to {url}", file.display(), human::bytes(bytes)));
    api.call(&["s3", "cp", "--only-show-errors", &file.display().to_string(), url])?;
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
    // EC2 gives no public address to a machine with several interfaces: four need a subnet with a way out of its own.
    let efa = match args.nodes > 1 && args.instance_type == "p4d.24xlarge" {
        true if args.subnets.is_empty() => "1",
        true => "4",
        false => "0",
    };
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
            if gigabytes >= FAST_FROM_GB {
                parameters.insert("VolumeThroughput", FAST.to_string());
            }
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
fn command(job: &Job, parameters: &BTreeMap<&str, String>, nodes: u32) -> String {
    let given = parameters.iter().filter(|(_, value)| !value.is_empty());
    let given: Vec<String> = given.map(|(key, value)| format!("{key}={value}")).collect();
    format!(
        "aws cloudformation deploy --stack-name {0} --template-file deploy/aws/baton.yaml --capabilities CAPABILITY_IAM \\\n    \
         --tags baton:job={job} --parameter-overrides {1}\n\
         aws autoscaling set-desired-capacity --auto-scaling-group-name {0} --desired-capacity {nodes}",
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
        let fleet = Fleet::look_and_listen(api, job, stack)?;
        for line in news(&fleet, *since, start.elapsed()) {
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
        let is_over = fleet.wanted == 0 && start.elapsed() >= SETTLED;
        if is_over || BEGUN.contains(&phase) {
            output::line(status::text(job, stack, &fleet, report.as_ref(), fleet::now()));
            output::note(format_args!(
                "\nlook: baton aws status --name {job}     reach it: baton aws connect --name {job} -- top     end it: baton aws down --name {job}"
            ));
            return if is_over { over(api, stack) } else { Ok(exit::OK) };
        }
        thread::sleep(INTERVAL);
    }
}

/// How a job ended that has no machines any more.
fn over(api: &impl Api, stack: &Stack) -> Result<u8, Failure> {
    let stages = fleet::stages(api, stack)?;
    let last = stages.into_values().max_by_key(|stage| stage.unix_seconds);
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

fn news(fleet: &Fleet, since: u64, waited: Duration) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    lines.extend(fleet.trouble.iter().map(|trouble| format!("no machine: {trouble}")));
    for machine in &fleet.machines {
        lines.push(format!("{} in {} is {}", machine.instance, machine.zone, machine.state));
        let fresh = machine.stage.iter().filter(|stage| stage.unix_seconds >= since);
        lines.extend(fresh.map(|stage| format!("{}: {}", machine.instance, stage.words)));
        if machine.runs() && machine.stage.is_none() && waited >= SILENT {
            lines.push(format!(
                "{0} has said nothing for {1}, and is paid for: has its subnet a way out (public addresses, NAT), and its image \
                 the AWS CLI? `aws ec2 get-console-output --latest --output text --instance-id {0}` shows its start, \
                 `baton aws down` ends it",
                machine.instance,
                human::duration(SILENT.as_secs_f64())
            ));
        }
    }
    lines
}

fn dollars(text: &str) -> Result<f64, String> {
    let price = text.parse::<f64>().ok().filter(|price| *price > 0.0 && price.is_finite());
    price.ok_or_else(|| "must be dollars per hour, e.g. 8.50".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;
    use crate::{
        fleet::{Machine, Role},
        testing::{Script, break_each, fleet_answers, stack, stack_of, told_answers},
    };

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn args(flags: &[&str]) -> Args {
        Line::parse_from([&["up", "recipe.toml"], flags].concat()).args
    }

    fn job() -> Job {
        "digits".parse().unwrap()
    }

    fn spec(overrides: &[&str]) -> JobSpec {
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        JobSpec::from_toml(include_str!("../../../recipes/digits_cpu.toml"), &overrides).unwrap()
    }

    #[test]
    fn what_would_be_paid_for_in_vain_is_refused() {
        for (flags, overrides, told) in [
            (
                &["--nodes", "4"][..],
                &["train.virtual_ranks=8"][..],
                Some("train.virtual_ranks=… and --set cluster.max_ranks=…, at least 32"),
            ),
            (&["--nodes", "4"], &["train.virtual_ranks=32", "cluster.max_ranks=0"], None),
            (
                &["--nodes", "4"],
                &["train.virtual_ranks=32", "cluster.max_ranks=24"],
                Some("has 24"),
            ),
            (
                &["--nodes", "2", "--volume-gb", "9"],
                &["train.virtual_ranks=16"],
                Some("--volume-gb"),
            ),
            (&[], &["limits.max_hours=1.0"], Some("add --volume-gb")),
            (&["--volume-gb", "9"], &["limits.max_hours=1.0"], None),
            (
                &["--nodes", "2"],
                &["train.virtual_ranks=16", "cluster.max_ranks=16", "limits.max_hours=1.0"],
                None,
            ),
        ] {
            let args = args(flags);
            let has_volume = args.volume_gb.is_some();
            let fits = fits(&args, &job(), &spec(overrides), false, has_volume);
            match (fits, told) {
                (Ok(()), None) => {}
                (Err(error), Some(told)) if error.contains(told) => {}
                (fits, _) => panic!("{flags:?} {overrides:?}: {fits:?}"),
            }
        }
        let two = args(&["--nodes", "2"]);
        let spec = spec(&["train.virtual_ranks=16"]);
        let error = fits(&two, &job(), &spec, true, true).unwrap_err();
        assert!(error.contains("another job"), "{error}");
    }

    fn made() -> Script {
        let mut stack = stack("CREATE_COMPLETE", &[("Nodes", "2")]);
        stack["Outputs"] = json!([{"OutputKey": "Coordinator", "OutputValue": "i-0"}]);
        Script::new()
            .error("describe-stacks", "ValidationError", "Stack baton-digits does not exist")
            .answer("describe-stack-events", json!({"StackEvents": []}))
            .answer("create-stack", json!({"StackId": "id"}))
            .answer("describe-stacks", json!({"Stacks": [stack]}))
            .answer("describe-stack-events", json!({"StackEvents": []}))
            .answer(
                "set-desired-capacity --auto-scaling-group-name baton-digits --desired-capacity 2",
                Value::Null,
            )
            .answer("start-instances --instance-ids i-0", Value::Null)
    }

    fn bucket() -> Script {
        Script::new()
            .error("head-bucket --bucket b --expected-bucket-owner 1", "404", "Not Found")
            .answer("create-bucket", json!({}))
            .answer("put-public-access-block", Value::Null)
            .answer("put-bucket-lifecycle-configuration", Value::Null)
    }

    /// What is looked at before anything is made.
    fn looked() -> Script {
        let subnet = json!({"SubnetId": "s", "VpcId": "v", "AvailabilityZone": "us-east-1a"});
        let offer = json!({"Location": "us-east-1a"});
        let price = json!({"AvailabilityZone": "us-east-1a", "SpotPrice": "0.1"});
        Script::new()
            .answer("sts get-caller-identity", json!({"Account": "1"}))
            .error("describe-stacks", "ValidationError", "Stack baton-digits-cpu does not exist")
            .answer("describe-volumes", json!({"Volumes": []}))
            .answer("describe-subnets", json!({"Subnets": [subnet]}))
            .answer("describe-instance-type-offerings", json!({"InstanceTypeOfferings": [offer]}))
            .answer("describe-spot-price-history", json!({"SpotPriceHistory": [price]}))
            .error("head-bucket --bucket baton-1-us-east-1", "404", "Not Found")
            .answer("create-bucket", json!({}))
    }

    /// A file that is not there yet.
    fn brought() -> Script {
        Script::new().error("head-object", "404", "Not Found").answer("s3 cp", Value::Null)
    }

    /// A group of four that is to have three.
    fn one_lost() -> Script {
        let group = json!({"AutoScalingGroups": [{"DesiredCapacity": 3}]});
        Script::new()
            .answer("describe-auto-scaling-groups", group)
            .answer("set-desired-capacity", Value::Null)
    }

    fn coordinator() -> Script {
        let machine = json!({"ImageId": "ami-1", "Placement": {"AvailabilityZone": "us-east-1b"}});
        Script::new()
            .answer("describe-instances", json!({"Reservations": [{"Instances": [machine]}]}))
    }

    #[test]
    fn machines_are_asked_for_once_the_stack_is_there() {
        let launched = make(&made(), job(), &BTreeMap::new(), 2).unwrap();
        assert_eq!(launched.stack.outputs["Coordinator"], "i-0");
        ensure_bucket(&bucket(), "b", Some("1"), "us-east-1").unwrap();
    }

    #[test]
    fn an_error_of_any_call_ends_the_launch_with_one_line_that_names_it() {
        let (args, spec) = (
            args(&["--yes", "--instance-type", "c7i.xlarge"]),
            spec(&["data.train=s3://x/train.beton", "data.val=s3://x/val.beton"]),
        );
        let recipe = Path::new("recipe.toml");
        break_each(looked, |api| launch(api, &args, recipe, spec.clone()));
        break_each(bucket, |api| ensure_bucket(api, "b", Some("1"), "us-east-1"));
        let file = tempfile::NamedTempFile::new().unwrap();
        break_each(brought, |api| upload(api, file.path(), "s3://b/k/f"));
        break_each(made, |api| make(api, job(), &BTreeMap::new(), 2));
        break_each(one_lost, |api| running(api, &job(), &stack_of("4")));
        let mut stack = stack_of("2");
        stack.outputs.insert("Coordinator".to_owned(), "i-0".to_owned());
        break_each(coordinator, |api| Coordinator::of(api, &stack));
        let launched = || Launched { job: job(), stack: stack.clone(), since: 0 };
        let begins = || told_answers(fleet_answers(Script::new(), 1, &["i-1"]));
        assert_eq!(follow(&begins(), &launched()).unwrap(), exit::OK);
        break_each(begins, |api| follow(api, &launched()));
        let listed = || Script::new().answer("s3 cp", Value::Null);
        break_each(listed, |api| over(api, &stack));
    }

    #[test]
    fn a_group_that_lost_a_machine_gets_it_back() {
        let api = one_lost();
        assert!(running(&api, &job(), &stack_of("4")).unwrap().is_some());
        assert!(api.called().last().is_some_and(|call| call.ends_with("--desired-capacity 4")));
        let group = |wanted: u64| json!({"AutoScalingGroups": [{"DesiredCapacity": wanted}]});
        let api = Script::new().answer("describe-auto-scaling-groups", group(4));
        assert!(running(&api, &job(), &stack_of("4")).unwrap().is_some());
        let api = Script::new().answer("describe-auto-scaling-groups", group(0));
        assert!(running(&api, &job(), &stack_of("4")).unwrap().is_none());
    }

    #[test]
    fn a_coordinator_from_before_keeps_its_place_and_image() {
        let mut stack = stack_of("2");
        assert!(Coordinator::of(&Script::new(), &stack).unwrap().is_none());
        stack.outputs.insert("Coordinator".to_owned(), "i-0".to_owned());
        let Coordinator { zone, image } = Coordinator::of(&coordinator(), &stack).unwrap().unwrap();
        assert_eq!((zone.as_str(), image.as_str()), ("us-east-1b", "ami-1"));
    }

    #[test]
    fn a_file_that_has_changed_is_brought_again() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "abc").unwrap();
        let there = |size: u64, at: &str| json!({"ContentLength": size, "LastModified": at});
        let unchanged = Script::new()
            .answer("head-object --bucket b --key k/f", there(3, "2999-01-01T00:00:00+00:00"));
        upload(&unchanged, file.path(), "s3://b/k/f").unwrap();
        for there in [there(4, "2999-01-01T00:00:00+00:00"), there(3, "2001-01-01T00:00:00+00:00")]
        {
            let api = Script::new().answer("head-object", there).answer("s3 cp", Value::Null);
            upload(&api, file.path(), "s3://b/k/f").unwrap();
            assert_eq!(api.called().len(), 2);
        }
    }

    #[test]
    fn a_machine_that_says_nothing_is_told_of_after_a_while() {
        let api = fleet_answers(Script::new(), 1, &["i-1"]);
        let fleet = Fleet::look(&api, &job()).unwrap();
        let Machine { role: Role::Node, .. } = fleet.machines[0] else { panic!("{fleet:?}") };
        assert_eq!(news(&fleet, 0, SILENT - Duration::from_secs(1)).len(), 1);
        let told = news(&fleet, 0, SILENT).pop().unwrap();
        assert!(told.contains("i-1 has said nothing") && told.contains("baton aws down"), "{told}");
    }
}
