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
    human, json, output,
    recipe::{about, find, read},
};
use baton_job::exit::{self, Failure};
use baton_plan::{Machine as MachineType, PlanRequest};
use baton_program::Program;
use baton_recipe::JobSpec;
use serde::Serialize;
use serde_json::Value;

use crate::{
    AwsFlags,
    api::Api,
    bundle,
    fleet::{self, Fleet},
    market::{self, Zone, ZoneChoice, list},
    recipe::{self, RemoteRecipe},
    stack::{self, Job, Stack},
    status::{self, StatusJson},
    volume::{self, Volume},
};

/// Launch a job on spot machines; run it again to resume where the job stopped
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton aws up resnet50_p4d_60ep --set data.train=s3://imagenet/train.beton --set data.val=s3://imagenet/val.beton
  baton aws up resnet50_p4d_60ep --volume-gb 400 --snapshot snap-0123456789abcdef0     data on a volume, at /data
  baton aws up recipe.toml --instance-type g6.12xlarge --max-price 2.50
  baton aws up recipe.toml --nodes 4
  baton aws up recipes/digits_cpu.toml --instance-type c7i.xlarge --on-demand          a first test, for cents
  baton aws up recipe.toml --stage-only        upload the files, print the CloudFormation command, launch nothing

It shows prices and asks before anything costs money. An interrupted machine is replaced, and training continues;
when the job has ended, its machines shut down. `baton aws down` removes the rest.")]
pub struct Args {
    /// Recipe file, or the name of a recipe in recipes/
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Name of the job [default: the recipe's name]
    #[arg(long, value_name = "NAME")]
    name: Option<Job>,
    /// Change one value of the recipe, e.g. --set train.epochs=3; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    aws: AwsFlags,
    /// Bucket for programs, checkpoints and logs [default: baton-ACCOUNT-REGION, created if it does not exist]
    #[arg(long, value_name = "BUCKET")]
    bucket: Option<String>,
    /// Machine type to rent
    #[arg(long, value_name = "TYPE", default_value = "p4d.24xlarge")]
    instance_type: String,
    /// Number of nodes; with several, the coordinator runs on a small machine of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=128))]
    nodes: u32,
    /// Rent on-demand machines: no spot interruptions, at the full price
    #[arg(long)]
    on_demand: bool,
    /// Highest price, dollars per hour and machine [default: the on-demand price]
    #[arg(long, value_name = "USD", conflicts_with = "on_demand", value_parser = dollars)]
    max_price: Option<f64>,
    /// Make a volume of this size for /data; the volume of an earlier launch is found automatically
    #[arg(long, value_name = "GB", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    volume_gb: Option<u32>,
    /// Snapshot from which to make the new volume
    #[arg(long, value_name = "SNAPSHOT", requires = "volume_gb")]
    snapshot: Option<String>,
    /// Availability zone [default: the volume's; without a volume the cheapest, or all if one node needs none]
    #[arg(long, value_name = "ZONE")]
    zone: Option<String>,
    /// Subnet for the machines; may be repeated [default: the subnets of the default network]
    #[arg(long = "subnet", value_name = "SUBNET")]
    subnets: Vec<String>,
    /// Your own machine image, with NVIDIA's driver and the AWS CLI [default: Amazon's newest deep learning image]
    #[arg(long, value_name = "AMI")]
    image: Option<String>,
    /// Show prices and upload the files, then print the CloudFormation command instead of running it
    #[arg(long)]
    stage_only: bool,
    /// Do not wait until training starts
    #[arg(long)]
    no_wait: bool,
    /// Do not ask for confirmation
    #[arg(short, long)]
    yes: bool,
    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Launched<'a> {
    job: &'a str,
    /// Address of the job's files in the bucket.
    url: String,
    /// With `--stage-only`, the commands with which the user can launch the job.
    commands: Option<Vec<String>>,
    /// The status when training has started, as by `baton aws status --json`; `null` with `--no-wait`.
    status: Option<StatusJson<'a>>,
}

/// Throughput of a large gp3 volume, MiB/s: the maximum for its 3,000 operations per second; the default is 125
/// (<https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html>).
const VOLUME_MIB_PER_SECOND: u32 = 750;
/// Size, in GB, from which a volume is expected to hold training data and gets this throughput.
const FAST_VOLUME_MIN_GB: u32 = 100;
/// Time after which a machine that has reported nothing is considered broken.
const FIRST_REPORT_TIMEOUT: Duration = Duration::from_secs(300);
/// Time during which AWS may still report the group's old desired capacity.
const GROUP_UPDATE_DELAY: Duration = Duration::from_secs(30);
/// Phases of a job that has started to train.
const STARTED_PHASES: [&str; 2] = ["training", "paused"];
/// Poll interval of the machines.
const FLEET_POLL_INTERVAL: Duration = Duration::from_secs(8);
/// Poll interval of the coordinator's machine while it stops or starts.
const COORDINATOR_POLL_INTERVAL: Duration = Duration::from_secs(4);
/// Time in which the coordinator's machine of a job that has ended stops.
const COORDINATOR_STOP_TIMEOUT: Duration = Duration::from_secs(180);
/// Time in which the coordinator's machine starts. If it is still stopping, EC2 may need minutes for that.
const COORDINATOR_START_TIMEOUT: Duration = Duration::from_secs(600);

pub(super) fn run(args: &Args) -> Result<u8, Failure> {
    let path = find(&args.recipe);
    let spec = read(&path, &args.overrides)?;
    let api = args.aws.api();
    let launched = match launch(&api, args, &path, spec)? {
        LaunchResult::Stack(launched) => launched,
        LaunchResult::Staged { job, url, commands } => {
            let text = commands.join("\n");
            let staged = Launched { job: job.name(), url, commands: Some(commands), status: None };
            json::print(args.json, &staged, |_| text);
            return Ok(exit::OK);
        }
    };
    if args.no_wait {
        let LaunchedJob { job, stack, .. } = &launched;
        let answer = Launched { job: job.name(), url: stack.url(), commands: None, status: None };
        json::print(args.json, &answer, |_| {
            format!("{job} is launched; `baton aws status --name {job}` shows its progress")
        });
        return Ok(exit::OK);
    }
    follow(&api, &launched, args.json)
}

/// What a launch has done.
enum LaunchResult {
    /// The job's stack exists.
    Stack(LaunchedJob),
    /// The job's files are uploaded to this address; the commands create the stack.
    Staged { job: Job, url: String, commands: Vec<String> },
}

/// A job whose stack exists.
struct LaunchedJob {
    job: Job,
    stack: Stack,
    /// Time of the launch, Unix seconds. Older reports are from an earlier launch.
    since: u64,
}

fn launch(
    api: &impl Api,
    args: &Args,
    path: &Path,
    spec: JobSpec,
) -> Result<LaunchResult, Failure> {
    let name = args.name.clone().map_or_else(|| Job::of_recipe(&spec.name), Ok);
    let job = name.map_err(|problem| about(path, problem))?;
    let account = api.json(&["sts", "get-caller-identity"])?;
    let existing = stack::find(api, &job)?;
    if let Some(stack) = &existing
        && let Some(launched) = running_job(api, args, &job, stack, COORDINATOR_POLL_INTERVAL)?
    {
        return Ok(LaunchResult::Stack(launched));
    }

    let volume = volume(api, &job)?;
    let has_volume = volume.is_some() || args.volume_gb.is_some();
    check_flags(args, &job, &spec, volume.is_some()).map_err(bad_input)?;
    let coordinator =
        existing.as_ref().map(|stack| CoordinatorMachine::of(api, stack)).transpose()?.flatten();
    if let (Some(CoordinatorMachine { zone, .. }), Some(requested)) = (&coordinator, &args.zone)
        && zone != requested
    {
        return Err(bad_input(format!(
            "the coordinator of {job}, which stores the journal, is in {zone}: leave --zone out, or run `baton aws down --name {job}` first"
        )));
    }
    let placement = match (&volume, &args.zone, &coordinator) {
        (Some(volume), _, _) => ZoneChoice::Zone(volume.zone.clone()),
        (None, Some(zone), _) => ZoneChoice::Zone(zone.clone()),
        (None, None, Some(coordinator)) => ZoneChoice::Zone(coordinator.zone.clone()),
        (None, None, None) if has_volume || args.nodes > 1 => ZoneChoice::OneZone,
        (None, None, None) => ZoneChoice::AnyZone,
    };
    let (vpc, zones) = market::zones(api, &args.instance_type, &args.subnets)?;
    let zones = market::choose(zones, &placement, &args.instance_type, args.max_price)?;

    let region = region(&zones);
    let bucket = match (&args.bucket, &existing) {
        (Some(bucket), _) => bucket.clone(),
        (None, Some(stack)) => stack.parameter("Bucket").to_owned(),
        (None, None) => {
            format!("baton-{}-{region}", account["Account"].as_str().unwrap_or_default())
        }
    };
    // On the volume it can only be checked by the machines.
    let is_here = spec.model.arch.is_program() && Path::new(&spec.model.program).exists();
    let program = is_here.then(|| Program::of_recipe(&spec)).transpose();
    let program = program.map_err(|error| about(path, format!("model.program: {error}")))?;
    let program = program.as_ref().map(|(program, _)| program);
    let mut remote = recipe::adapt(spec, &job, &bucket, has_volume, Path::exists)
        .map_err(|problem| about(path, problem))?;
    let prices = Prices::of(args, &zones);
    // The job uses this price to count its cost.
    if let (None, Some(price)) = (remote.spec.limits.dollars_per_hour, prices.per_machine) {
        remote.spec.limits.dollars_per_hour = Some(price * f64::from(args.nodes));
    }
    for line in summary(&job, args, &zones, &prices, volume.as_ref(), &remote, program) {
        output::note(line);
    }
    if !args.stage_only {
        confirm(args, "launch?")?;
    }

    // The owner of a bucket that the user named, now or at an earlier launch, is not checked: the user chose it.
    let is_default_bucket = args.bucket.is_none() && existing.is_none();
    let owner = is_default_bucket.then(|| account["Account"].as_str()).flatten();
    ensure_bucket(api, &bucket, owner, &region)?;
    for (file, url) in &remote.uploads {
        upload(api, file, url)?;
    }
    let job_url = format!("s3://{bucket}/{job}");
    let digest = bundle::stage(api, &job_url, &remote.spec.to_toml(), &remote.staged)?;
    let mut parameters =
        parameters(args, &job, &bucket, digest, &vpc, &zones, volume.as_ref(), &remote);
    if let (Some(coordinator), None) = (&coordinator, &args.image) {
        // Another image would replace the coordinator's machine and lose its journal.
        parameters.insert("Image", coordinator.image.clone());
    }
    if args.stage_only {
        let commands = commands(&job, &parameters, args.nodes, &args.aws);
        return Ok(LaunchResult::Staged { job, url: job_url, commands });
    }
    create(api, job, existing.as_ref(), &parameters, args.nodes, COORDINATOR_POLL_INTERVAL)
        .map(LaunchResult::Stack)
}

/// Asks for confirmation, unless the user has given `--yes`.
fn confirm(args: &Args, question: &str) -> Result<(), Failure> {
    if args.yes {
        return Ok(());
    }
    match output::confirm(question) {
        Some(true) => Ok(()),
        Some(false) => Err(bad_input("nothing was launched")),
        None => Err(bad_input(
            "cannot ask for confirmation without a terminal: add --yes; nothing was launched",
        )),
    }
}

/// Creates the stack or updates the existing one, then requests machines. If their number were in the template, a
/// launch while AWS has no capacity would fail instead of waiting for machines.
fn create(
    api: &impl Api,
    job: Job,
    existing: Option<&Stack>,
    parameters: &BTreeMap<&'static str, String>,
    nodes: u32,
    poll_interval: Duration,
) -> Result<LaunchedJob, Failure> {
    let since = fleet::now();
    if let Some(stack) = existing {
        wait_until_stopped(api, stack, poll_interval)?;
    }
    output::note(format_args!("creating the stack {}", job.stack()));
    let stack = stack::deploy(api, &job, parameters)?;
    start_coordinator(api, &stack, poll_interval)?;
    fleet::set_desired_capacity(api, &job, nodes)?;
    Ok(LaunchedJob { job, stack, since })
}

/// Waits until the coordinator's machine of a job that has ended is stopped. It powers off just after it has set the
/// group to 0; until then it still runs, and starting it would have no effect.
fn wait_until_stopped(
    api: &impl Api,
    stack: &Stack,
    poll_interval: Duration,
) -> Result<(), Failure> {
    let (start, mut is_noted) = (Instant::now(), false);
    // A machine that keeps running belongs to a launch that did not finish: it can be used.
    while let Some(CoordinatorMachine { id, state, .. }) = CoordinatorMachine::of(api, stack)?
        && state != "stopped"
        && start.elapsed() < COORDINATOR_STOP_TIMEOUT
    {
        if !is_noted {
            output::note(format_args!(
                "the coordinator's machine {id} is {state}: waiting until it has stopped, {} at most",
                human::duration(COORDINATOR_STOP_TIMEOUT.as_secs_f64())
            ));
            is_noted = true;
        }
        thread::sleep(poll_interval);
    }
    Ok(())
}

fn coordinator_is_gone(stack: &Stack, id: &str) -> Failure {
    bad_input(format!(
        "the coordinator's machine {id} no longer exists: run `baton aws down --name {}`, then launch the job again",
        stack.parameter("Job")
    ))
}

/// Starts the coordinator's machine, if the job has one, and waits until it runs. Machines with GPUs are requested only
/// after that: without a coordinator they would cost money for nothing.
fn start_coordinator(
    api: &impl Api,
    stack: &Stack,
    poll_interval: Duration,
) -> Result<(), Failure> {
    let Some(id) = stack.outputs.get("Coordinator") else { return Ok(()) };
    let start = Instant::now();
    loop {
        let state = CoordinatorMachine::of(api, stack)?.map(|machine| machine.state);
        match state.as_deref() {
            Some("running") => return Ok(()),
            None => {
                return Err(coordinator_is_gone(stack, id));
            }
            Some(state) if start.elapsed() >= COORDINATOR_START_TIMEOUT => {
                return Err(failed(format!(
                    "the coordinator's machine {id} is still {state}; no machine with GPUs was requested: try again later"
                )));
            }
            Some("stopped") => {
                api.json(&["ec2", "start-instances", "--instance-ids", id])?;
            }
            Some(_) => {}
        }
        thread::sleep(poll_interval);
    }
}

/// Checks that the requested machines and volume can be used by the job.
///
/// # Errors
/// One line: what cannot be used, and what to do.
fn check_flags(args: &Args, job: &Job, spec: &JobSpec, volume_exists: bool) -> Result<(), String> {
    if volume_exists && args.nodes > 1 {
        return Err(format!(
            "{job} has a volume, which only one machine can use: for several nodes, choose another job name with --name"
        ));
    }
    if args.volume_gb.is_some() && args.nodes > 1 {
        return Err("--volume-gb is for one machine: several nodes read their data from a bucket"
            .to_owned());
    }
    if let Ok(machine) = MachineType::named(&args.instance_type) {
        let (max_ranks, gpus) = (spec.max_ranks(), machine.gpus);
        if max_ranks <= (args.nodes - 1) * gpus {
            return Err(format!(
                "--nodes {}: the recipe has at most {max_ranks} ranks, which need {} of {gpus} GPUs; the other machines would be \
                 paid for but idle. To use all, set more ranks: --set train.virtual_ranks=… and \
                 --set cluster.max_ranks=…, at least {} (docs/recipes.md)",
                args.nodes,
                human::count(u64::from(max_ranks.div_ceil(gpus)), "machine"),
                args.nodes * gpus
            ));
        }
    }
    Ok(())
}

/// The coordinator's machine of an earlier launch on several nodes. The journal is on its disk.
struct CoordinatorMachine {
    id: String,
    /// EC2's state: `pending`, `running`, `stopping` or `stopped`.
    state: String,
    zone: String,
    image: String,
}

impl CoordinatorMachine {
    fn of(api: &impl Api, stack: &Stack) -> Result<Option<Self>, Failure> {
        let Some(id) = stack.outputs.get("Coordinator") else { return Ok(None) };
        let answer = api.json(&[
            "ec2",
            "describe-instances",
            "--filters",
            &format!("Name=instance-id,Values={id}"),
            "Name=instance-state-name,Values=pending,running,stopping,stopped",
        ])?;
        let mut instances =
            list(&answer, "Reservations").flat_map(|reservation| list(reservation, "Instances"));
        Ok(instances.next().and_then(|instance| {
            Some(Self {
                id: id.clone(),
                state: instance["State"]["Name"].as_str()?.to_owned(),
                zone: instance["Placement"]["AvailabilityZone"].as_str()?.to_owned(),
                image: instance["ImageId"].as_str()?.to_owned(),
            })
        }))
    }
}

/// The job, if it already has machines. They are not changed: they keep running what they were started with. Machines
/// that it lacks are requested again, after a confirmation.
fn running_job(
    api: &impl Api,
    args: &Args,
    job: &Job,
    stack: &Stack,
    poll_interval: Duration,
) -> Result<Option<LaunchedJob>, Failure> {
    let desired = fleet::desired_capacity(&fleet::group(api, job)?);
    if desired == 0 {
        return Ok(None);
    }
    if args.stage_only {
        return Err(bad_input(format!(
            "{job} is running, and --stage-only does not change it: run `baton aws connect --name {job} -- drain` first"
        )));
    }
    // A node that failed on its own has reduced the group's desired capacity.
    let nodes: u32 = stack.parameter("Nodes").parse().unwrap_or(1);
    let has_all = desired >= u64::from(nodes);
    let coordinator = CoordinatorMachine::of(api, stack)?;
    if let (Some(id), None) = (stack.outputs.get("Coordinator"), &coordinator) {
        return Err(coordinator_is_gone(stack, id));
    }
    let runs =
        coordinator.is_some_and(|machine| ["pending", "running"].contains(&machine.state.as_str()));
    let lacks_coordinator = stack.outputs.contains_key("Coordinator") && !runs;
    let state = if has_all && !lacks_coordinator {
        format!("{job} already has its machines: they continue")
    } else {
        let coordinator =
            if lacks_coordinator { ", and its coordinator's machine does not run" } else { "" };
        output::note(format_args!("{job} has {desired} of {nodes} machines{coordinator}"));
        confirm(args, "start what it lacks?")?;
        start_coordinator(api, stack, poll_interval)?;
        if !has_all {
            fleet::set_desired_capacity(api, job, nodes)?;
        }
        "what it lacked was requested, and the running machines continue".to_owned()
    };
    output::note(format_args!(
        "{state} unchanged. For another recipe or other machines, run `baton aws connect --name {job} -- drain` first"
    ));
    Ok(Some(LaunchedJob { job: job.clone(), stack: stack.clone(), since: 0 }))
}

/// The job's volume, if one exists.
fn volume(api: &impl Api, job: &Job) -> Result<Option<Volume>, Failure> {
    let mut volumes = volume::of(api, job)?;
    if volumes.len() > 1 {
        let ids: Vec<&str> = volumes.iter().map(|volume| volume.id.as_str()).collect();
        return Err(bad_input(format!(
            "several volumes have the tag baton:job = {job} ({}): remove the tag from all but one",
            ids.join(", ")
        )));
    }
    Ok(volumes.pop())
}

/// The region of the zones. A zone's name is the region's name and a letter.
fn region(zones: &[Zone]) -> String {
    zones
        .first()
        .map(|zone| zone.name.trim_end_matches(|c: char| c.is_ascii_lowercase()).to_owned())
        .unwrap_or_default()
}

/// Prices of one machine, dollars per hour.
struct Prices {
    /// Price in the chosen market, spot or on demand.
    per_machine: Option<f64>,
    on_demand: Option<f64>,
}

impl Prices {
    fn of(args: &Args, zones: &[Zone]) -> Self {
        let machine = MachineType::named(&args.instance_type).ok();
        let on_demand = machine.map(|machine| machine.prices.on_demand);
        let spot = zones.iter().filter_map(|zone| zone.spot).next();
        Self { per_machine: if args.on_demand { on_demand } else { spot }, on_demand }
    }
}

/// Lines that show machines, prices, volume and uploads before the launch.
fn summary(
    job: &Job,
    args: &Args,
    zones: &[Zone],
    prices: &Prices,
    volume: Option<&Volume>,
    remote: &RemoteRecipe,
    program: Option<&Program>,
) -> Vec<String> {
    let mut lines = vec![format!("{job}: {} x {}", args.nodes, args.instance_type)];
    for zone in zones {
        lines.push(match (args.on_demand, zone.spot) {
            (true, _) => format!("  {}", zone.name),
            (false, Some(price)) => {
                format!("  {}: ${price:.4} per hour and machine now, spot", zone.name)
            }
            (false, None) => format!("  {}: AWS gives no spot price", zone.name),
        });
    }
    match (prices.per_machine, prices.on_demand) {
        (Some(now), Some(on_demand)) if now < on_demand => {
            lines.push(format!(
                "  on demand ${on_demand:.2} (price list of {}): {} less",
                baton_plan::price::LOOKED_UP,
                human::percent(1.0 - now / on_demand)
            ));
        }
        _ => {}
    }
    if let Some(price) = prices.per_machine {
        let total = price * f64::from(args.nodes);
        let limit = args.max_price.map_or_else(String::new, |max| {
            format!(", at most ${:.2}", max * f64::from(args.nodes))
        });
        lines.push(format!("  machines: ${total:.2} per hour{limit}"));
        lines.extend(estimate(args, remote, program, price));
    }
    match (volume, args.volume_gb) {
        (Some(volume), requested) => {
            let unused =
                if requested.is_some() { "; --volume-gb and --snapshot are ignored" } else { "" };
            lines.push(format!(
                "  volume {} ({} GB) in {}, from an earlier launch{unused}",
                volume.id, volume.gigabytes, volume.zone
            ));
        }
        (None, Some(gigabytes)) => {
            let fast = match gigabytes >= FAST_VOLUME_MIN_GB {
                true => format!(
                    " and {VOLUME_MIB_PER_SECOND} MiB/s (the speed costs about $25 per month)"
                ),
                false => String::new(),
            };
            lines.push(format!("  a new volume of {gigabytes} GB{fast} at /data, kept until `baton aws down --delete-data`"));
        }
        (None, None) => {}
    }
    lines.push(format!("  checkpoints: {}", remote.spec.checkpoint.dir));
    for (file, url) in &remote.uploads {
        lines.push(format!("  upload {} to {url}", file.display()));
    }
    lines
}

/// Time and cost estimated as `baton plan` does, if it supports the machine type and the data's size is known.
fn estimate(
    args: &Args,
    remote: &RemoteRecipe,
    program: Option<&Program>,
    price: f64,
) -> Option<String> {
    let machine = MachineType::named(&args.instance_type).ok()?;
    let samples = |location: &str| {
        let local = remote
            .uploads
            .iter()
            .find(|(_, url)| url == location)
            .map(|(file, _)| file.display().to_string());
        match Samples::at(local.as_deref().unwrap_or(location), None).ok()? {
            Samples::Known(samples) => Some(samples),
            Samples::Unknown(_) => None,
        }
    };
    let request = PlanRequest {
        spec: &remote.spec,
        samples: samples(&remote.spec.data.train)?,
        val_samples: samples(&remote.spec.data.val)?,
        signal: [1, 100],
        program,
        language: None,
        dollars_per_hour: Some(price),
        calibration: None,
    };
    let plan = request.plan(machine).ok()?;
    (args.nodes == 1).then(|| {
        format!(
            "  `baton plan` estimates {}, ${:.2}; nothing was measured",
            human::duration(plan.seconds),
            plan.seconds / 3_600.0 * price
        )
    })
}

/// Creates the bucket unless it exists; `owner` is the account that must own it, if that is checked.
fn ensure_bucket(
    api: &impl Api,
    bucket: &str,
    owner: Option<&str>,
    region: &str,
) -> Result<(), Failure> {
    let mut head = vec!["s3api", "head-bucket", "--bucket", bucket];
    if let Some(owner) = owner {
        // Another account could own a bucket of this name and read what is stored there.
        head.extend(["--expected-bucket-owner", owner]);
    }
    if api.find(&head)?.is_some() {
        return Ok(());
    }
    output::note(format_args!("creating the bucket {bucket}, without public access"));
    let mut arguments = vec!["s3api", "create-bucket", "--bucket", bucket];
    let constraint = format!("LocationConstraint={region}");
    // S3 rejects this region as a location constraint, because it is the default.
    if region != "us-east-1" {
        arguments.extend(["--create-bucket-configuration", &constraint]);
    }
    api.json(&arguments)?;
    let block_all = "BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true";
    api.json(&[
        "s3api",
        "put-public-access-block",
        "--bucket",
        bucket,
        "--public-access-block-configuration",
        block_all,
    ])?;
    // A machine interrupted during an upload leaves parts that no listing shows but that cost money.
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

/// Uploads a file, unless the bucket has one of the same size that is not older.
fn upload(api: &impl Api, file: &Path, url: &str) -> Result<(), Failure> {
    let file_error = |error| failed(format!("{}: {error}", file.display()));
    let metadata = file.metadata().map_err(file_error)?;
    let (bytes, modified) = (metadata.len(), metadata.modified().map_err(file_error)?);
    let (bucket, key) = url.trim_start_matches("s3://").split_once('/').unwrap_or_default();
    let stored = api.find(&["s3api", "head-object", "--bucket", bucket, "--key", key])?;
    let is_same = |stored: Value| {
        let uploaded = fleet::time(stored["LastModified"].as_str()?)?;
        Some(stored["ContentLength"].as_u64() == Some(bytes) && uploaded >= modified)
    };
    if stored.and_then(is_same) == Some(true) {
        return Ok(());
    }
    output::note(format_args!("uploading {} ({}) to {url}", file.display(), human::bytes(bytes)));
    api.call(&["s3", "cp", "--only-show-errors", &file.display().to_string(), url])?;
    Ok(())
}

#[allow(clippy::too_many_arguments, reason = "the template's parameters come from many sources")]
fn parameters(
    args: &Args,
    job: &Job,
    bucket: &str,
    digest: String,
    vpc: &str,
    zones: &[Zone],
    volume: Option<&Volume>,
    remote: &RemoteRecipe,
) -> BTreeMap<&'static str, String> {
    let subnets: Vec<&str> = zones.iter().map(|zone| zone.subnet.as_str()).collect();
    // EFA (Elastic Fabric Adapter) helps only between nodes, and this code supports only the p4d's adapters.
    // EC2 gives no public address to a machine with several interfaces, so four interfaces need a subnet with
    // a NAT route.
    let efa = match args.nodes > 1 && args.instance_type == "p4d.24xlarge" {
        true if args.subnets.is_empty() => "1",
        true => "4",
        false => "0",
    };
    let mut parameters = BTreeMap::from([
        ("Job", job.name().to_owned()),
        ("Bucket", bucket.to_owned()),
        ("BundleDigest", digest),
        ("DataBucket", remote.data_bucket.clone().unwrap_or_default()),
        ("InstanceType", args.instance_type.clone()),
        ("Nodes", args.nodes.to_string()),
        ("Market", if args.on_demand { "on-demand" } else { "spot" }.to_owned()),
        ("MaxPrice", args.max_price.map(|price| price.to_string()).unwrap_or_default()),
        ("Image", args.image.clone().unwrap_or_default()),
        ("EfaInterfaces", efa.to_owned()),
        ("Vpc", vpc.to_owned()),
        ("Subnets", subnets.join(",")),
        // The template's defaults. `aws cloudformation deploy` would use the values of an earlier launch instead.
        ("VolumeId", String::new()),
        ("VolumeGb", "0".to_owned()),
        ("VolumeThroughput", "125".to_owned()),
        ("VolumeZone", String::new()),
        ("Snapshot", String::new()),
    ]);
    match (volume, args.volume_gb) {
        (Some(volume), _) => {
            parameters.insert("VolumeId", volume.id.clone());
        }
        (None, Some(gigabytes)) => {
            parameters.insert("VolumeGb", gigabytes.to_string());
            if gigabytes >= FAST_VOLUME_MIN_GB {
                parameters.insert("VolumeThroughput", VOLUME_MIB_PER_SECOND.to_string());
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

/// The commands with which the user can create the same stack and request its machines.
fn commands(
    job: &Job,
    parameters: &BTreeMap<&str, String>,
    nodes: u32,
    aws: &AwsFlags,
) -> Vec<String> {
    // Empty ones too: this command uses the values of an earlier launch for those that are missing.
    let given: Vec<String> =
        parameters.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let (stack, flags) = (job.stack(), aws.text());
    let mut commands = vec![format!(
        "aws cloudformation deploy{flags} --stack-name {stack} --template-file deploy/aws/baton.yaml --capabilities CAPABILITY_IAM \\\n    \
         --no-fail-on-empty-changeset --tags baton:job={job} --parameter-overrides {}",
        given.join(" ")
    )];
    if nodes > 1 {
        // It is stopped if the job has ended; if it is running, this changes nothing.
        commands.push(format!(
            "aws ec2 start-instances{flags} --instance-ids \"$(aws cloudformation describe-stacks{flags} --stack-name {stack} \\\n    \
             --output text --query \"Stacks[0].Outputs[?OutputKey=='Coordinator'].OutputValue\")\""
        ));
    }
    commands.push(format!(
        "aws autoscaling set-desired-capacity{flags} --auto-scaling-group-name {stack} --desired-capacity {nodes}"
    ));
    commands
}

/// Waits until the job trains, and prints what happens until then.
fn follow(api: &impl Api, launched: &LaunchedJob, as_json: bool) -> Result<u8, Failure> {
    let LaunchedJob { job, stack, since } = launched;
    output::note("waiting until training starts; Ctrl-C stops waiting, the job continues");
    let (mut printed, start) = (Vec::new(), Instant::now());
    loop {
        let fleet = Fleet::query_with_stages(api, job, stack)?;
        for line in progress_lines(&fleet, job, *since, start.elapsed()) {
            if !printed.contains(&line) {
                output::note(format_args!(
                    "  {}: {line}",
                    human::duration(start.elapsed().as_secs_f64())
                ));
                printed.push(line);
            }
        }
        let report = fleet::report(api, stack)?.filter(|report| report.unix_seconds >= *since);
        let phase =
            report.as_ref().and_then(|report| report.status["phase"].as_str()).unwrap_or_default();
        let has_ended = fleet.desired == 0 && start.elapsed() >= GROUP_UPDATE_DELAY;
        if has_ended || STARTED_PHASES.contains(&phase) {
            let status = Some(StatusJson::new(job, stack, &fleet, report.as_ref()));
            let answer = Launched { job: job.name(), url: stack.url(), commands: None, status };
            json::print(as_json, &answer, |_| {
                status::text(job, stack, &fleet, report.as_ref(), fleet::now())
            });
            output::note(format_args!(
                "\nstatus: baton aws status --name {job}     connect: baton aws connect --name {job} -- top     end: baton aws down --name {job}"
            ));
            return if has_ended { outcome(api, job, stack) } else { Ok(exit::OK) };
        }
        thread::sleep(FLEET_POLL_INTERVAL);
    }
}

/// The outcome of a job that has no machines any more, from the last stage that a machine reported.
fn outcome(api: &impl Api, job: &Job, stack: &Stack) -> Result<u8, Failure> {
    let stages = fleet::stages(api, stack)?;
    let last = stages.into_values().max_by_key(|stage| stage.unix_seconds);
    match last.map(|stage| stage.text) {
        Some(text) if text == "completed" => Ok(exit::OK),
        Some(text) => Err(failed(format!(
            "the job ended: {text}; `baton aws logs --name {job}` shows the log"
        ))),
        None => Err(failed(format!(
            "the job ended before any machine reported; `baton aws status --name {job}` may show why"
        ))),
    }
}

/// Lines about the state and stage of each machine, and about what is wrong. `waited` is the time since the launch.
fn progress_lines(fleet: &Fleet, job: &Job, since: u64, waited: Duration) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    lines.extend(fleet.launch_failure.iter().map(|failure| format!("no machine: {failure}")));
    for machine in &fleet.machines {
        lines.push(format!("{} in {} is {}", machine.instance, machine.zone, machine.state));
        let current = machine.stage.iter().filter(|stage| stage.unix_seconds >= since);
        lines.extend(current.map(|stage| format!("{}: {}", machine.instance, stage.text)));
        if machine.is_running() && machine.stage.is_none() && waited >= FIRST_REPORT_TIMEOUT {
            lines.push(format!(
                "{0} has reported nothing for {1}, and costs money: check that its subnet has a route to the internet (public \
                 addresses, NAT) and its image has the AWS CLI; `aws ec2 get-console-output --latest --output text \
                 --instance-id {0}` shows its start, `baton aws down --name {job}` ends it",
                machine.instance,
                human::duration(FIRST_REPORT_TIMEOUT.as_secs_f64())
            ));
        }
    }
    lines
}

/// Parses a price, dollars per hour.
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
        testing::{ScriptedApi, break_each, fleet_answers, report_answers, stack, stack_of},
    };

    #[derive(Parser)]
    struct TestCommand {
        #[command(flatten)]
        args: Args,
    }

    fn args(flags: &[&str]) -> Args {
        TestCommand::parse_from([&["up", "recipe.toml"], flags].concat()).args
    }

    fn job() -> Job {
        "digits".parse().unwrap()
    }

    fn spec(overrides: &[&str]) -> JobSpec {
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        JobSpec::from_toml(include_str!("../../../recipes/digits_cpu.toml"), &overrides).unwrap()
    }

    #[test]
    fn machines_that_could_not_be_used_are_rejected() {
        for (flags, overrides, expected) in [
            (
                &["--nodes", "4"][..],
                &["train.virtual_ranks=8"][..],
                Some("train.virtual_ranks=… and --set cluster.max_ranks=…, at least 32"),
            ),
            (&["--nodes", "4"], &["train.virtual_ranks=32", "cluster.max_ranks=0"], None),
            (
                &["--nodes", "4"],
                &["train.virtual_ranks=32", "cluster.max_ranks=24"],
                Some("has at most 24"),
            ),
            (
                &["--nodes", "2", "--volume-gb", "9"],
                &["train.virtual_ranks=16"],
                Some("--volume-gb"),
            ),
            (&[], &["limits.max_hours=1.0"], None),
            (
                &["--nodes", "2"],
                &["train.virtual_ranks=16", "cluster.max_ranks=16", "limits.max_hours=1.0"],
                None,
            ),
        ] {
            let args = args(flags);
            let checked = check_flags(&args, &job(), &spec(overrides), false);
            match (checked, expected) {
                (Ok(()), None) => {}
                (Err(error), Some(expected)) if error.contains(expected) => {}
                (checked, _) => panic!("{flags:?} {overrides:?}: {checked:?}"),
            }
        }
        let two = args(&["--nodes", "2"]);
        let spec = spec(&["train.virtual_ranks=16"]);
        let error = check_flags(&two, &job(), &spec, true).unwrap_err();
        assert!(error.contains("another job"), "{error}");
    }

    /// A job on two nodes, with a coordinator.
    fn stack_with_coordinator() -> Stack {
        let mut stack = stack_of("2");
        stack.outputs.insert("Coordinator".to_owned(), "i-0".to_owned());
        stack
    }

    /// Adds the answer to a query of the coordinator's machine.
    fn coordinator_answer(script: ScriptedApi, state: &str) -> ScriptedApi {
        let machine = json!({"ImageId": "ami-1", "State": {"Name": state},
            "Placement": {"AvailabilityZone": "us-east-1b"}});
        let answer = json!({"Reservations": [{"Instances": [machine]}]});
        script.answer("describe-instances --filters Name=instance-id,Values=i-0", answer)
    }

    const START: &str = "start-instances --instance-ids i-0";
    const REQUEST: &str =
        "set-desired-capacity --auto-scaling-group-name baton-digits --desired-capacity 2";

    fn create_answers() -> ScriptedApi {
        let mut stack = stack("CREATE_COMPLETE", &[("Nodes", "2")]);
        stack["Outputs"] = json!([{"OutputKey": "Coordinator", "OutputValue": "i-0"}]);
        let script = ScriptedApi::new()
            .error("describe-stacks", "ValidationError", "Stack baton-digits does not exist")
            .answer("describe-stack-events", json!({"StackEvents": []}))
            .answer("create-stack", json!({"StackId": "id"}))
            .answer("describe-stacks", json!({"Stacks": [stack]}))
            .answer("describe-stack-events", json!({"StackEvents": []}));
        coordinator_answer(script, "running").answer(REQUEST, Value::Null)
    }

    /// Answers about a job that is resumed while its coordinator's machine still powers off.
    fn resume_answers() -> ScriptedApi {
        let mut stack = stack("UPDATE_COMPLETE", &[("Nodes", "2")]);
        stack["Outputs"] = json!([{"OutputKey": "Coordinator", "OutputValue": "i-0"}]);
        let stacks = json!({"Stacks": [stack]});
        let mut script = ScriptedApi::new();
        for state in ["running", "stopping", "stopped"] {
            script = coordinator_answer(script, state);
        }
        script = script
            .answer("describe-stacks", stacks.clone())
            .answer("describe-stack-events", json!({"StackEvents": []}))
            .answer("update-stack", json!({"StackId": "id"}))
            .answer("describe-stacks", stacks)
            .answer("describe-stack-events", json!({"StackEvents": []}));
        script = coordinator_answer(script, "stopped").answer(START, Value::Null);
        for state in ["pending", "running"] {
            script = coordinator_answer(script, state);
        }
        script.answer(REQUEST, Value::Null)
    }

    fn create_new(api: &ScriptedApi) -> Result<LaunchedJob, Failure> {
        create(api, job(), None, &BTreeMap::new(), 2, Duration::ZERO)
    }

    fn resume(api: &ScriptedApi) -> Result<LaunchedJob, Failure> {
        let existing = stack_with_coordinator();
        create(api, job(), Some(&existing), &BTreeMap::new(), 2, Duration::ZERO)
    }

    fn bucket_answers() -> ScriptedApi {
        ScriptedApi::new()
            .error("head-bucket --bucket b --expected-bucket-owner 1", "404", "Not Found")
            .answer("create-bucket", json!({}))
            .answer("put-public-access-block", Value::Null)
            .answer("put-bucket-lifecycle-configuration", Value::Null)
    }

    /// Answers to the queries before anything is created.
    fn query_answers() -> ScriptedApi {
        let subnet = json!({"SubnetId": "s", "VpcId": "v", "AvailabilityZone": "us-east-1a"});
        let offer = json!({"Location": "us-east-1a"});
        let price = json!({"AvailabilityZone": "us-east-1a", "SpotPrice": "0.1"});
        ScriptedApi::new()
            .answer("sts get-caller-identity", json!({"Account": "1"}))
            .error("describe-stacks", "ValidationError", "Stack baton-digits-cpu does not exist")
            .answer("describe-volumes", json!({"Volumes": []}))
            .answer("describe-subnets", json!({"Subnets": [subnet]}))
            .answer("describe-instance-type-offerings", json!({"InstanceTypeOfferings": [offer]}))
            .answer("describe-spot-price-history", json!({"SpotPriceHistory": [price]}))
            .error("head-bucket --bucket baton-1-us-east-1", "404", "Not Found")
            .answer("create-bucket", json!({}))
    }

    /// Answers to the upload of a file that is not stored yet.
    fn upload_answers() -> ScriptedApi {
        ScriptedApi::new().error("head-object", "404", "Not Found").answer("s3 cp", Value::Null)
    }

    /// Answers about a group of four machines whose desired capacity has become three.
    fn one_lost() -> ScriptedApi {
        let group = json!({"AutoScalingGroups": [{"DesiredCapacity": 3}]});
        ScriptedApi::new()
            .answer("describe-auto-scaling-groups", group)
            .answer("set-desired-capacity", Value::Null)
    }

    fn coordinator_answers() -> ScriptedApi {
        coordinator_answer(ScriptedApi::new(), "running")
    }

    /// Answers about a group of two machines that has all, but whose coordinator's machine is stopped.
    fn coordinator_stopped() -> ScriptedApi {
        let group = json!({"AutoScalingGroups": [{"DesiredCapacity": 2}]});
        let mut script = ScriptedApi::new().answer("describe-auto-scaling-groups", group);
        for _ in 0..2 {
            script = coordinator_answer(script, "stopped");
        }
        coordinator_answer(script.answer(START, Value::Null), "running")
    }

    fn run_again(
        api: &ScriptedApi,
        flags: &[&str],
        stack: &Stack,
    ) -> Result<Option<LaunchedJob>, Failure> {
        running_job(api, &args(flags), &job(), stack, Duration::ZERO)
    }

    #[test]
    fn machines_are_requested_once_the_stack_exists() {
        let launched = create_new(&create_answers()).unwrap();
        assert_eq!(launched.stack.outputs["Coordinator"], "i-0");
        ensure_bucket(&bucket_answers(), "b", Some("1"), "us-east-1").unwrap();
    }

    #[test]
    fn a_resumed_job_requests_machines_only_when_its_coordinator_runs() {
        let api = resume_answers();
        resume(&api).unwrap();
        assert_eq!(api.len(), 0, "{:?}", api.called());
        break_each(resume_answers, resume);
    }

    #[test]
    fn without_the_coordinators_machine_no_other_is_requested() {
        let script = ScriptedApi::new().answer("describe-instances", json!({"Reservations": []}));
        let failure = start_coordinator(&script, &stack_with_coordinator(), Duration::ZERO);
        let failure = failure.unwrap_err();
        assert!(failure.message.contains("i-0 no longer exists"), "{failure}");
    }

    #[test]
    fn a_running_job_without_its_coordinators_machine_gets_it_back() {
        let stack = stack_with_coordinator();
        let api = coordinator_stopped();
        assert!(run_again(&api, &["--yes"], &stack).unwrap().is_some());
        assert_eq!(api.len(), 0, "{:?}", api.called());
        break_each(coordinator_stopped, |api| run_again(api, &["--yes"], &stack));
    }

    #[test]
    fn a_running_job_whose_coordinators_machine_is_gone_cannot_continue() {
        let group = json!({"AutoScalingGroups": [{"DesiredCapacity": 2}]});
        let gone = json!({"Reservations": []});
        let api = ScriptedApi::new()
            .answer("describe-auto-scaling-groups", group)
            .answer("describe-instances", gone);
        let failure = run_again(&api, &["--yes"], &stack_with_coordinator()).err().unwrap();
        let expected = "i-0 no longer exists: run `baton aws down --name digits`";
        assert!(failure.message.contains(expected), "{failure}");
    }

    #[test]
    fn staging_does_not_change_a_running_job() {
        let api = one_lost();
        let failure = run_again(&api, &["--stage-only"], &stack_of("4")).err().unwrap();
        assert!(failure.message.contains("--stage-only does not change it"), "{failure}");
        assert_eq!(api.called().len(), 1, "{:?}", api.called());
    }

    #[test]
    fn a_staged_job_prints_its_commands_as_json_too() {
        let parameters = BTreeMap::from([("Job", "digits".to_owned()), ("Image", String::new())]);
        let aws = args(&["--region", "eu-west-1", "--profile", "me"]).aws;
        let commands = commands(&job(), &parameters, 3, &aws);
        let [deploy, start, request] = &commands[..] else { panic!("{commands:?}") };
        assert!(deploy.ends_with(" --parameter-overrides Image= Job=digits"), "{deploy}");
        assert!(deploy.contains(" --no-fail-on-empty-changeset "), "{deploy}");
        assert!(start.starts_with("aws ec2 start-instances "), "{start}");
        assert!(request.ends_with("baton-digits --desired-capacity 3"), "{request}");
        for command in &commands {
            assert!(command.contains(" --region eu-west-1 --profile me "), "{command}");
        }
        assert_eq!(super::commands(&job(), &parameters, 1, &AwsFlags::default()).len(), 2);
        let (job, url) = ("digits", "s3://b/digits".to_owned());
        let staged = Launched { job, url, commands: Some(commands.clone()), status: None };
        let expected = json!({
            "job": "digits", "url": "s3://b/digits", "commands": commands, "status": null,
        });
        assert_eq!(serde_json::to_value(&staged).unwrap(), expected);
    }

    #[test]
    fn a_job_without_a_volume_is_launched_with_the_templates_defaults() {
        let (args, job) = (args(&[]), job());
        let remote = recipe::adapt(spec(&[]), &job, "b", false, |_| true).unwrap();
        let given = parameters(&args, &job, "b", String::new(), "v", &[], None, &remote);
        for name in ["VolumeId", "VolumeGb", "VolumeThroughput", "VolumeZone", "Snapshot"] {
            let (_, declared) = stack::TEMPLATE.split_once(&format!("\n  {name}:\n")).unwrap();
            let mut lines = declared.lines().take_while(|line| line.starts_with("    "));
            let default = lines.find_map(|line| line.strip_prefix("    Default: ")).unwrap();
            assert_eq!(given[name], default.trim_matches('"'), "{name}");
        }
    }

    #[test]
    fn an_error_of_any_call_ends_the_launch_with_one_line_that_names_it() {
        let (args, spec) = (
            args(&["--yes", "--instance-type", "c7i.xlarge"]),
            spec(&["data.train=s3://x/train.beton", "data.val=s3://x/val.beton"]),
        );
        let recipe = Path::new("recipe.toml");
        break_each(query_answers, |api| launch(api, &args, recipe, spec.clone()));
        break_each(bucket_answers, |api| ensure_bucket(api, "b", Some("1"), "us-east-1"));
        let file = tempfile::NamedTempFile::new().unwrap();
        break_each(upload_answers, |api| upload(api, file.path(), "s3://b/k/f"));
        break_each(create_answers, create_new);
        break_each(one_lost, |api| run_again(api, &["--yes"], &stack_of("4")));
        let stack = stack_with_coordinator();
        break_each(coordinator_answers, |api| CoordinatorMachine::of(api, &stack));
        let launched = || LaunchedJob { job: job(), stack: stack.clone(), since: 0 };
        let starting = || report_answers(fleet_answers(ScriptedApi::new(), 1, &["i-1"]));
        assert_eq!(follow(&starting(), &launched(), true).unwrap(), exit::OK);
        break_each(starting, |api| follow(api, &launched(), false));
        let stages = || ScriptedApi::new().answer("s3 cp", Value::Null);
        break_each(stages, |api| outcome(api, &job(), &stack));
    }

    #[test]
    fn a_group_that_lost_a_machine_gets_it_back() {
        let api = one_lost();
        assert!(run_again(&api, &["--yes"], &stack_of("4")).unwrap().is_some());
        assert!(api.called().last().is_some_and(|call| call.ends_with("--desired-capacity 4")));
        let group = |desired: u64| json!({"AutoScalingGroups": [{"DesiredCapacity": desired}]});
        let api = ScriptedApi::new().answer("describe-auto-scaling-groups", group(4));
        assert!(run_again(&api, &[], &stack_of("4")).unwrap().is_some());
        let api = ScriptedApi::new().answer("describe-auto-scaling-groups", group(0));
        assert!(run_again(&api, &[], &stack_of("4")).unwrap().is_none());
    }

    #[test]
    fn an_existing_coordinator_keeps_its_zone_and_image() {
        let machine = CoordinatorMachine::of(&ScriptedApi::new(), &stack_of("2")).unwrap();
        assert!(machine.is_none());
        let machine = CoordinatorMachine::of(&coordinator_answers(), &stack_with_coordinator());
        let machine = machine.unwrap().unwrap();
        assert_eq!((machine.zone.as_str(), machine.image.as_str()), ("us-east-1b", "ami-1"));
    }

    #[test]
    fn a_changed_file_is_uploaded_again() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "abc").unwrap();
        let stored = |size: u64, at: &str| json!({"ContentLength": size, "LastModified": at});
        let unchanged = ScriptedApi::new()
            .answer("head-object --bucket b --key k/f", stored(3, "2999-01-01T00:00:00+00:00"));
        upload(&unchanged, file.path(), "s3://b/k/f").unwrap();
        for object in
            [stored(4, "2999-01-01T00:00:00+00:00"), stored(3, "2001-01-01T00:00:00+00:00")]
        {
            let api = ScriptedApi::new().answer("head-object", object).answer("s3 cp", Value::Null);
            upload(&api, file.path(), "s3://b/k/f").unwrap();
            assert_eq!(api.called().len(), 2);
        }
    }

    #[test]
    fn a_machine_that_reports_nothing_is_shown_after_a_while() {
        let api = fleet_answers(ScriptedApi::new(), 1, &["i-1"]);
        let fleet = Fleet::query(&api, &job()).unwrap();
        let Machine { role: Role::Node, .. } = fleet.machines[0] else { panic!("{fleet:?}") };
        assert_eq!(
            progress_lines(&fleet, &job(), 0, FIRST_REPORT_TIMEOUT - Duration::from_secs(1)).len(),
            1
        );
        let line = progress_lines(&fleet, &job(), 0, FIRST_REPORT_TIMEOUT).pop().unwrap();
        assert!(line.contains("i-1 has reported nothing"), "{line}");
        assert!(line.contains("`baton aws down --name digits`"), "{line}");
    }
}
