"""A cloud on one machine: moto's AWS, and a machine that really boots for every instance.

This adds what moto lacks: user data is run, volumes appear as disks, the metadata service of each machine answers,
and machines are interrupted like spot machines. Costs and permissions are not checked: moto accepts all calls.
"""

import base64
import datetime
import email
import io
import json
import logging
import os
import threading
import time
import urllib.parse

import boto3
from machine import BRIDGE, Machine
from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.ssm.models import Parameter, ssm_backends
from werkzeug.serving import make_server

REGION = "us-east-1"
ZONE = REGION + "a"
# Seconds of a spot notice, as EC2 gives them.
NOTICE = 120
# Limit for each wait; reached only when something is broken.
TIMEOUT_SECONDS = 600
IMAGE_PARAMETER = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
IMAGE = "ami-12c6146b"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "no-secret"}


class Cloud:
    def __init__(self, folder, repository, programs):
        self.folder, self.repository, self.programs = folder, repository, programs
        self.machines, self.volumes = {}, {}
        self.completed_hooks, self.broken = [], None
        self.stopping = threading.Event()
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        moto = DomainDispatcherApplication(create_backend_app)
        self.server = make_server(BRIDGE, 0, lambda *arguments: self.answer(moto, *arguments), threaded=True)
        self.url = f"http://{BRIDGE}:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        name_image()
        self.ec2, self.autoscaling, self.s3, self.cloudformation, self.ssm = (
            self.client(name) for name in ("ec2", "autoscaling", "s3", "cloudformation", "ssm")
        )
        self.watcher = threading.Thread(target=self.watch)
        self.watcher.start()

    def client(self, service):
        return boto3.client(
            service,
            region_name=REGION,
            endpoint_url=self.url,
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )

    def environment(self):
        """The environment of a user's shell."""
        path = os.pathsep.join(
            [str(self.folder / "bin"), str(self.repository / ".venv-deploy/bin"), os.environ["PATH"]]
        )
        return {
            "PATH": path,
            "HOME": str(self.folder),
            "AWS_ENDPOINT_URL": self.url,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
            **KEYS,
        }

    # --- Calls --------------------------------------------------------------------------------

    def answer(self, moto, environ, start_response):
        """Answers calls that moto does not support, and passes the others to moto."""
        length = int(environ.get("CONTENT_LENGTH") or 0)
        operation = environ.get("HTTP_X_AMZ_TARGET", "").split(".")[-1]
        if not operation and environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
            body = environ["wsgi.input"].read(length)
            environ["wsgi.input"] = io.BytesIO(body)
            form = urllib.parse.parse_qs(body.decode())
            operation = form.get("Action", [""])[0]
            if operation == "CompleteLifecycleAction":
                self.completed_hooks.append(form["InstanceId"][0])
                return reply(
                    start_response,
                    "200 OK",
                    "text/xml",
                    "<CompleteLifecycleActionResponse><CompleteLifecycleActionResult/></CompleteLifecycleActionResponse>",
                )
        if operation == "StartSession":
            return reply(
                start_response,
                "200 OK",
                "application/x-amz-json-1.1",
                json.dumps({"SessionId": "s", "TokenValue": "t", "StreamUrl": "wss://nowhere"}),
            )
        return moto(environ, start_response)

    # --- Machines -----------------------------------------------------------------------------

    def watch(self):
        """Simulates EC2 until the end; an error is raised by the next wait of the test."""
        try:
            while not self.stopping.wait(0.5):
                self.look()
        except Exception as error:
            self.broken = error

    def look(self):
        """Starts a machine for every running instance, attaches volumes, and ends machines whose instance has ended."""
        self.tag_volumes()
        for instance in ec2_backends[DEFAULT_ACCOUNT_ID][REGION].all_instances():
            machine = self.machines.get(instance.id)
            if instance.state == "running" and machine is None:
                self.start(instance)
            elif machine and instance.state in ("terminated", "shutting-down", "stopped") and not machine.is_off:
                machine.off()
                self.unplug(machine)
            elif machine and machine.has_shut_down() and instance.state == "running":
                # The machine shut itself down; with this template that stops the instance.
                self.ec2.stop_instances(InstanceIds=[instance.id])
        for volume in self.ec2.describe_volumes()["Volumes"]:
            for attachment in volume["Attachments"]:
                machine = self.machines.get(attachment["InstanceId"])
                if machine and volume["VolumeId"] in self.volumes and attachment["State"] == "attached":
                    machine.plug(volume["VolumeId"], self.volumes[volume["VolumeId"]])

    def tag_volumes(self):
        """Adds the volume tags of the template, which moto drops, and creates a file for each volume."""
        for volume in self.ec2.describe_volumes()["Volumes"]:
            tags = {tag["Key"]: tag["Value"] for tag in volume.get("Tags", [])}
            if tags.get("aws:cloudformation:logical-id") != "Volume" or volume["VolumeId"] in self.volumes:
                continue
            disk = self.folder / f"{volume['VolumeId']}.img"
            with open(disk, "wb") as file:
                file.truncate(256 << 20)
            self.volumes[volume["VolumeId"]] = disk
            job = tags["aws:cloudformation:stack-name"].removeprefix("baton-")
            self.ec2.create_tags(Resources=[volume["VolumeId"]], Tags=[{"Key": "baton:job", "Value": job}])

    def unplug(self, machine):
        for volume in self.ec2.describe_volumes()["Volumes"]:
            for attachment in volume["Attachments"]:
                if attachment["InstanceId"] == machine.id and volume["VolumeId"] in self.volumes:
                    self.ec2.detach_volume(VolumeId=volume["VolumeId"])

    def user_data(self, instance):
        answer = self.ec2.describe_instance_attribute(InstanceId=instance, Attribute="userData")
        return base64.b64decode(answer["UserData"]["Value"])

    def start(self, instance):
        machine = Machine(self, instance.id, instance.private_ip, script_of(self.user_data(instance.id)))
        # Registered before it runs, so that it ends with the others if its start fails.
        self.machines[instance.id] = machine
        machine.on()

    def interrupt(self, instance, has_saved):
        """Interrupts a machine like EC2: a notice, some time, the end. The group then starts another one."""
        machine = self.machines[instance]
        end = time.time() + NOTICE
        at = datetime.datetime.fromtimestamp(end, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        machine.metadata["spot/instance-action"] = json.dumps({"action": "terminate", "time": at})
        # EC2 waits for the whole time; here a machine that has saved ends earlier.
        while time.time() < end and not (has_saved() and machine.is_idle()):
            time.sleep(0.5)
        self.ec2.terminate_instances(InstanceIds=[instance])

    def rebalance(self, group, instance):
        """Replaces a machine like a group with capacity rebalancing: starts another one, then ends this one with its hook."""
        machine = self.machines[instance]
        machine.metadata["events/recommendations/rebalance"] = json.dumps({"noticeTime": "2026-01-01T00:00:00Z"})
        self.autoscaling.update_auto_scaling_group(AutoScalingGroupName=group, MaxSize=2, DesiredCapacity=2)
        started = lambda: any(member != instance and self.machines.get(member) for member in self.members(group))
        self.until("the group starts another machine", started)
        machine.metadata["autoscaling/target-lifecycle-state"] = "Terminated"
        self.until(f"{instance} completes its hook", lambda: instance in self.completed_hooks)
        self.autoscaling.terminate_instance_in_auto_scaling_group(
            InstanceId=instance, ShouldDecrementDesiredCapacity=True
        )
        self.autoscaling.update_auto_scaling_group(AutoScalingGroupName=group, MaxSize=1)

    def until(self, what, look):
        """Waits until `look` returns a true value, and returns it."""
        deadline = time.time() + TIMEOUT_SECONDS
        while not (seen := look()):
            if self.broken:
                raise self.broken
            assert time.time() < deadline, f"not within {TIMEOUT_SECONDS} s: {what}"
            time.sleep(0.5)
        return seen

    def members(self, group):
        groups = self.autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[group])["AutoScalingGroups"]
        return [instance["InstanceId"] for found in groups for instance in found["Instances"]]

    def close(self):
        self.stopping.set()
        self.watcher.join()
        for machine in self.machines.values():
            if not machine.is_off:
                machine.off()
        self.server.shutdown()


def reply(start_response, status, kind, text):
    body = text.encode()
    start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]


def name_image():
    """Adds Amazon's image parameter, which moto lacks and does not allow to create."""
    parameters = ssm_backends[DEFAULT_ACCOUNT_ID][REGION]._parameters
    parameters[IMAGE_PARAMETER].append(
        Parameter(
            account_id=DEFAULT_ACCOUNT_ID,
            name=IMAGE_PARAMETER,
            value=IMAGE,
            parameter_type="String",
            description="",
            allowed_pattern=None,
            keyid=None,
            last_modified_date=datetime.datetime.now(),
            version=1,
            data_type="text",
            labels=[],
        )
    )


def script_of(user_data):
    """The shell script in the user data for cloud-init."""
    parts = email.message_from_bytes(user_data).walk()
    [script] = [part.get_payload() for part in parts if part.get_content_type() == "text/x-shellscript"]
    return script
