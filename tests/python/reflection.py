"""Lists the services of a gRPC server by reflection, and calls JobService.GetStatus without a generated stub.

PYTHONPATH=.tools/python python3 tests/python/reflection.py HOST:PORT
"""

import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

with grpc.insecure_channel(sys.argv[1]) as channel:
    database = ProtoReflectionDescriptorDatabase(channel)
    for service in sorted(database.get_services()):
        print(service)
    method = DescriptorPool(database).FindServiceByName("baton.v1.JobService").FindMethodByName("GetStatus")
    request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    get_status = channel.unary_unary(
        "/baton.v1.JobService/GetStatus",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )
    print("GetStatus:", get_status(request(), timeout=60).name)
