"""What an operator does to the policy: the services, and the emergency stop that one of them clears."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode
from std_srvs.srv import SetBool, Trigger

from aura_ros.errors import UserError
from aura_ros.nodes.estop import LOOK_S, EmergencyStop
from aura_ros.nodes.policy_worker import PolicyWorker
from aura_ros.nodes.run_action import RunAction
from aura_ros.srv import LoadMemory, SaveMemory


class PolicyServices(LifecycleNode):
    """A lifecycle node with the policy's services, action and e-stop; `worker` is None while it is not configured."""

    def __init__(self, name: str, **node_options: Any):
        super().__init__(name, **node_options)
        self.worker: PolicyWorker | None = None
        self._instruction = ""  # the newest of the topic: a goal's own one is the worker's alone
        self._pressed = False  # the e-stop's newest message
        self._stopped = False  # since the e-stop was pressed, until ~/clear_fault
        self.create_service(Trigger, "~/reset", self._on_reset)
        self.create_service(SetBool, "~/enable", self._on_enable)
        self.create_service(Trigger, "~/clear_fault", self._on_clear_fault)
        self.create_service(SaveMemory, "~/save_memory", self._on_save_memory)
        self.create_service(LoadMemory, "~/load_memory", self._on_load_memory)
        # Made before the cameras' subscriptions, it is served before them when both wait.
        estop = EmergencyStop(self, self._on_estop)
        self.create_timer(LOOK_S, estop.look, clock=Clock(clock_type=ClockType.STEADY_TIME))
        self._run = RunAction(self, lambda: self.worker, lambda: self._instruction)

    def destroy_node(self) -> None:
        """Leave the graph with the action, which rclpy does not destroy with its node."""
        self._run.destroy()
        super().destroy_node()

    def _on_estop(self, pressed: bool) -> None:
        if pressed and not self._pressed:
            self.get_logger().error("emergency stop: nothing is inferred until ~/clear_fault")
        self._pressed = pressed
        self._stopped = self._stopped or pressed
        self._hold_emergency_stop()

    def _hold_emergency_stop(self) -> None:
        """Let the worker, also a new one, be stopped while the e-stop was not cleared."""
        if self._stopped and self.worker is not None:
            self.worker.emergency_stop()
            self._run.check()

    def _on_reset(self, _request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        if self.worker is None:
            return answer(response, False, "not configured: there is no memory to reset")
        return answer(response, True, f"epoch {self.worker.new_epoch('reset requested')}")

    def _on_enable(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        if self.worker is None:
            return answer(response, False, "not configured")
        self.worker.set_enabled(request.data)
        self._run.check()
        return answer(response, True, "enabled" if request.data else "disabled")

    def _on_clear_fault(self, _request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        if self.worker is None:
            return answer(response, False, "not configured")
        if self._pressed:
            return answer(
                response,
                False,
                "the e-stop is pressed (topic estop says true); release it, then clear the fault",
            )
        self._run.check()  # a goal is told of a fault before it is gone
        self._stopped = False
        fault = self.worker.clear_fault()
        return answer(response, True, f"cleared: {fault}" if fault else "there was no fault")

    def _on_save_memory(self, request: SaveMemory.Request, response: SaveMemory.Response) -> Any:
        return self._with_memory(lambda worker: worker.save_state(request.path), response)

    def _on_load_memory(self, request: LoadMemory.Request, response: LoadMemory.Response) -> Any:
        return self._with_memory(lambda worker: worker.load_state(request.path), response)

    def _with_memory(self, job: Callable[[PolicyWorker], int], response: Any) -> Any:
        if self.worker is None:
            return answer(response, False, "not configured: there is no memory")
        try:
            response.epoch = job(self.worker)
        except Exception as error:
            response.epoch = self.worker.epoch
            if not isinstance(error, UserError):
                self.get_logger().error(f"memory service failed\n{traceback.format_exc()}")
            return answer(response, False, " ".join(str(error).split()))
        return answer(response, True, "done")


def answer(response: Any, success: bool, message: str) -> Any:
    """Fill a service's response."""
    response.success, response.message = success, message
    return response
